"""A timing cache of TensorRT is read, used and written for each version and GPU, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.build.test_options import plain_tensorrt
from tfexport.errors import EngineError
from tfexport.tensorrt.build import builder
from tfexport.tensorrt.build.builder import attach_timing_cache, save_timing_cache


class CachingConfig:
    """The timing caches of an `IBuilderConfig`; it accepts those that begin with `mark`."""

    def __init__(self, mark: bytes = b"", takes: bool = True) -> None:
        self.mark, self.takes, self.cache = mark, takes, b""

    def create_timing_cache(self, known: bytes) -> bytes | None:
        return known if known.startswith(self.mark) or not known else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return self.takes

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b"more")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "need_gpu", lambda: L4)


@pytest.mark.usefixtures("gpu")
def test_a_timing_cache_is_read_used_and_written(tmp_path: Path) -> None:
    directory = str(tmp_path / "new" / "caches")
    for expected in (b"more", b"moremore"):
        config = CachingConfig()
        path = attach_timing_cache(plain_tensorrt(), config, directory)
        save_timing_cache(config, path)
        assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["10.0.1-NVIDIA-L4.timing"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("config", [CachingConfig(mark=b"other"), CachingConfig(takes=False)])
def test_a_timing_cache_that_is_refused_is_named(tmp_path: Path, config: CachingConfig) -> None:
    (tmp_path / "10.0.1-NVIDIA-L4.timing").write_bytes(b"strange")
    with pytest.raises(EngineError, match=r"10\.0\.1-NVIDIA-L4\.timing: tensorrt 10\.0\.1 does not accept it"):
        attach_timing_cache(plain_tensorrt(), config, str(tmp_path))


@pytest.mark.usefixtures("gpu")
def test_a_timing_cache_that_is_no_file_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "10.0.1-NVIDIA-L4.timing"
    path.mkdir()
    with pytest.raises(EngineError, match="not a file of at most"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path))
    path.rmdir()
    path.write_bytes(b"12345")
    monkeypatch.setattr(builder, "MAX_TIMING_CACHE_BYTES", 4)
    with pytest.raises(EngineError, match="not a file of at most 4 bytes; remove it"):
        attach_timing_cache(plain_tensorrt(), CachingConfig(), str(tmp_path))


def test_a_timing_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written"):
        save_timing_cache(CachingConfig(), tmp_path / "file" / "cache.timing")
