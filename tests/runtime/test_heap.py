"""A closed model returns its memory to the system."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest

from tests import tiny
from tfexport.model.model import Model
from tfexport.runtime.eager import EagerSession

BLOCK_BYTES, NUM_BLOCKS = 64 * 1024, 1000


def resident_mb() -> float:
    found = re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return int(found[1]) * 1024 / 1e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no arenas")
def test_freed_memory_is_returned_to_the_system() -> None:
    """The C library keeps freed memory as long as a used block follows it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    model = Model(EagerSession(tiny.model(tiny.VARIANTS["post"])), None)
    blocks = [libc.malloc(ctypes.c_size_t(BLOCK_BYTES)) for _ in range(NUM_BLOCKS + 1)]
    for block in blocks:
        libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(BLOCK_BYTES))
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = resident_mb()
    model.close()
    after = resident_mb()
    libc.free(ctypes.c_void_p(blocks[-1]))
    assert after < before - 0.9 * NUM_BLOCKS * BLOCK_BYTES / 1e6
