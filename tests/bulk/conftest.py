"""Use the model of the server's tests."""

from tests.serve.conftest import model

__all__ = ["model"]
