"""The real CUDA, watched: what is no live memory is refused before anything touches it, and what is made is counted."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import torch_engine
from tests.gpu.torch_engine import OWNED, WatchedCuda
from tests.trt.cuda_double import MisuseError
from tfexport.trt import cuda


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedCuda:
    """A watched device over a runtime that does nothing, successfully."""
    handles, done = itertools.count(4096, 4096), SimpleNamespace(value=0)
    functions: dict[str, Any] = {made: lambda *given: (done, next(handles)) for made in OWNED}
    functions |= {freed: lambda *given: (done,) for freed in OWNED.values()}
    functions |= {"cudaStreamNonBlocking": 1, "cudaEventDisableTiming": 2, "cudaHostAllocDefault": 0}
    monkeypatch.setattr(cuda, "need_gpu", lambda: None)
    monkeypatch.setattr(torch_engine, "over_memory", lambda address, num_bytes: (address, num_bytes))
    device = WatchedCuda()
    monkeypatch.setattr(device, "_runtime", SimpleNamespace(**functions))
    return device


def test_only_live_device_memory_is_seen(watched: WatchedCuda) -> None:
    first, second = watched.allocate(512), watched.allocate(512)
    assert watched.view(first + 256, 256, on_device=True) == (first + 256, 256)
    assert watched.view(first + 256, 256, on_device=True) is watched.view(first + 256, 256, on_device=True)
    assert [watched.is_device(place) for place in (first, first + 511, first + 512, second)] == [
        True,
        True,
        False,
        True,
    ]
    for address, num_bytes, on_device in ((first + 256, 257, True), (7, 1, True), (first, 1, False)):
        with pytest.raises(MisuseError, match="no live device memory"):
            watched.view(address, num_bytes, on_device=on_device)
    watched.free(first)
    with pytest.raises(MisuseError, match="no live device memory"):
        watched.view(first + 256, 256, on_device=True)
    with pytest.raises(MisuseError, match="nobody allocated"):
        watched.free(first)
    assert watched.device_bytes == 512


def test_what_is_made_is_freed_or_counted(watched: WatchedCuda) -> None:
    assert watched.is_empty
    made = watched.allocate(8), watched.stream(), watched.event()
    assert not watched.is_empty
    watched.free(made[0])
    watched.destroy_stream(made[1])
    assert not watched.is_empty
    watched.destroy_event(made[2])
    assert watched.is_empty
