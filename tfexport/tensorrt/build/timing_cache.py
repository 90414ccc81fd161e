"""The timing cache of TensorRT: what was measured of each kernel, kept between builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tfexport._io.atomic import whole_file
from tfexport.errors import EngineError
from tfexport.tensorrt.cuda import need_gpu
from tfexport.tensorrt.library import Library

# A cache of a large network has some megabytes.
MAX_BYTES = 1024 * 1024 * 1024


def timing_cache_file(directory: str, version: str, gpu_name: str) -> Path:
    """Name the cache file of one version on one kind of GPU, such as "10.16.1.11-NVIDIA-L4.timing"."""
    return Path(directory) / f"{version}-{re.sub('[^A-Za-z0-9.]+', '-', gpu_name)}.timing"


def attach_timing_cache(library: Library, config: Any, directory: str | None) -> Path | None:
    """Let a build use, and fill, the cache of this version and GPU in a directory.

    Args:
        library: a library that times its kernels; `resolve_options` refuses others.
        config: an `IBuilderConfig`, changed in place.
        directory: need not exist; None for no cache.

    Returns:
        The file to save to.

    Raises:
        BackendError: there is no GPU.
        EngineError: the file cannot be read, is too large, or the library does not take it.
    """
    if directory is None:
        return None
    path = timing_cache_file(directory, library.version, need_gpu().name)
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_BYTES):
            raise EngineError(f"timing cache {path}: no file of at most {MAX_BYTES} bytes; remove it")
        known = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise EngineError(f"timing cache {path}: cannot be read ({error.strerror}); choose another place") from error
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(f"timing cache {path}: {library.target} {library.version} does not take it; remove it")
    return path


def save_timing_cache(config: Any, path: Path | None) -> None:
    """Write what a build has measured, whole or not at all.

    Args:
        config: of the build, an `IBuilderConfig`.
        path: from `attach_timing_cache`.

    Raises:
        EngineError: the cache cannot be had or written.
        BundleError: another process is writing it.
    """
    if path is None:
        return
    cache = config.get_timing_cache()
    memory = None if cache is None else cache.serialize()
    if memory is None:
        raise EngineError(f"timing cache {path}: the library gives none back; build without --timing-cache")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as draft:
            draft.write_bytes(bytes(memory))
    except OSError as error:
        raise EngineError(f"timing cache {path}: cannot be written ({error.strerror}); choose another place") from error
