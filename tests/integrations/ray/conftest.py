"""The nodes, for all tests of a file; skipped if Ray is not installed."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integrations.ray.cluster import Machines

# Ray reads its environment when it is imported, and would store its token in the user's home.
if "RAY_AUTH_TOKEN_PATH" not in os.environ:
    _WORK = Path(tempfile.mkdtemp(prefix="tfexport-ray-"))
    _TOKEN = _WORK / "auth_token"
    _TOKEN.touch(0o600)
    _TOKEN.write_text(os.urandom(32).hex())
    atexit.register(shutil.rmtree, _WORK, ignore_errors=True)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_TOKEN), "RAY_USAGE_STATS_ENABLED": "0"}

# Importing it warns.
with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
    importlib.import_module("ray.serve")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    pytest.importorskip("ray", reason="Ray is not installed; pip install 'tfexport[ray]'")
    from tests.integrations.ray.cluster import machines

    with machines() as found:
        yield found
