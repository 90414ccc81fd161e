"""Fixtures of the server's tests, and tests that are coroutine functions."""

from tests.serve.conftest import model, pytest_pyfunc_call, texts

__all__ = ["model", "pytest_pyfunc_call", "texts"]
