"""Bundles for the tests of serving."""

from __future__ import annotations

import asyncio
import gc
import inspect
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.serve.served import BEFORE, engine_threads
from tfexport.model.load import load
from tfexport.model.model import Model


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutine functions."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def model(dates_bundle: Path) -> Model:
    return load(dates_bundle, threads=1)


@pytest.fixture(scope="session")
def texts(model: Model) -> list[str]:
    assert model.tokenizer
    return [sample.text for sample in model.tokenizer.text.samples]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Check that the engines of a test end their threads."""
    BEFORE.clear()
    BEFORE.update(engine_threads())
    yield
    gc.collect()
    for thread in engine_threads():
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Sequence[object]]:
    """Return a context that trusts a new certificate, and the options that serve it."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    try:
        subprocess.run([*made.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes a certificate, is not installed")
    options = ("--threads", 1, "--tls-cert", certificate, "--tls-key", key)
    return ssl.create_default_context(cafile=certificate), options
