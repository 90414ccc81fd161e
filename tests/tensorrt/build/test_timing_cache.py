"""A timing cache of TensorRT is read, used and written for each version and GPU, or refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.build.test_options import plain_tensorrt
from tfexport.errors import EngineError
from tfexport.tensorrt.build import builder
from tfexport.tensorrt.build.builder import attach_timing_cache, build_engine, save_timing_cache
from tfexport.tensorrt.build.network import Network
from tfexport.tensorrt.config import EngineConfig


class Timings:
    """An `ITimingCache`, whose entries are words."""

    def __init__(self, entries: bytes, combines: bool = True) -> None:
        self.entries, self.combines = set(entries.split()), combines

    def combine(self, input_cache: Timings, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.entries |= input_cache.entries
        return self.combines

    def serialize(self) -> bytes:
        return b" ".join(sorted(self.entries))


class CachingConfig:
    """The timing caches of an `IBuilderConfig`; it accepts those that begin with `mark`."""

    def __init__(self, new: bytes = b"new", *, mark: bytes = b"", takes: bool = True, combines: bool = True) -> None:
        self.new, self.mark, self.takes, self.combines = new, mark, takes, combines
        self.cache: Timings | None = None

    def create_timing_cache(self, known: bytes) -> Timings | None:
        return Timings(known, self.combines) if known.startswith(self.mark) or not known else None

    def set_timing_cache(self, cache: Timings, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return self.takes

    def get_timing_cache(self) -> Timings | None:
        if self.cache is not None:
            self.cache.entries.add(self.new)  # by the build
        return self.cache


def test_a_timing_cache_is_read_used_and_written(tmp_path: Path) -> None:
    directory = str(tmp_path / "new" / "caches")
    for new, expected in ((b"one", b"one"), (b"two", b"one two")):
        config = CachingConfig(new)
        path = attach_timing_cache(plain_tensorrt(), config, directory, L4)
        save_timing_cache(config, path)
        assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["10.0.1-NVIDIA-L4.timing"]


def test_builds_at_once_add_to_each_other(tmp_path: Path) -> None:
    configs = [CachingConfig(b"build%d" % number) for number in range(16)]
    (path,) = {attach_timing_cache(plain_tensorrt(), config, str(tmp_path), L4) for config in configs}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda config: save_timing_cache(config, path), configs))
    assert set(path.read_bytes().split()) == {config.new for config in configs}


@pytest.mark.parametrize("config", [CachingConfig(mark=b"other"), CachingConfig(takes=False)])
def test_a_timing_cache_that_is_refused_is_named(tmp_path: Path, config: CachingConfig) -> None:
    (tmp_path / "10.0.1-NVIDIA-L4.timing").write_bytes(b"strange")
    with pytest.raises(EngineError, match=r"10\.0\.1-NVIDIA-L4\.timing: tensorrt 10\.0\.1 does not accept it"):
        attach_timing_cache(plain_tensorrt(), config, str(tmp_path), L4)


def test_a_timing_cache_that_is_no_file_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "10.0.1-NVIDIA-L4.timing"
    path.mkdir()
    with pytest.raises(EngineError, match="not a file of at most"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path), L4)
    path.rmdir()
    path.write_bytes(b"12345")
    monkeypatch.setattr(builder, "MAX_TIMING_CACHE_BYTES", 4)
    with pytest.raises(EngineError, match="not a file of at most 4 bytes; remove it"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path), L4)


@pytest.mark.parametrize("fails", ["write", "combine", "read", "none"])
def test_a_finished_build_is_not_lost_with_its_timings(
    tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = CachingConfig(combines=fails != "combine")
    config.clear_flag = config.set_flag = lambda flag: None
    path = tmp_path / "10.0.1-NVIDIA-L4.timing"

    def build(network: object, options: object) -> Any:
        if fails == "none":
            config.cache = None
        elif fails == "write":
            path.mkdir()
        else:  # by another build
            path.write_bytes(b"other")
            config.mark = b"strange" if fails == "read" else b""
        return memoryview(b"plan")

    library = plain_tensorrt()
    library.trt.IProgressMonitor = object
    builder = SimpleNamespace(create_builder_config=lambda: config, build_serialized_network=build)
    network = Network("toy", library, library.listen(), None, builder, None, [], [], {})
    assert build_engine(network, (), EngineConfig(timing_cache=str(tmp_path)), gpu=L4) == b"plan"
    assert "not saved" in caplog.text
    assert path.exists() == (fails != "none")
    assert fails in ("write", "none") or path.read_bytes() == b"other"
