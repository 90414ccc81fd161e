"""Detect CPU cores and instruction sets, and choose thread counts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, cast

from tfexport._arguments import is_whole
from tfexport.bundle.bundle import Bundle
from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS

_ROOT = Path("/")
_sharing = 1  # processes of a server that share the cores
# More cores than any machine has. A process with too many threads runs out of memory.
MAX_THREADS = 1024
# Tokens times weights of a run that one thread computes as fast as two, which have to wake or to wait for each other.
ENCODER_ALONE, DECODER_ALONE = 8_000_000, 4_000_000
# A step that reads more bytes of weights is limited by memory, even with one row, and gets all threads.
ONE_THREAD_BELOW = 4 * 2**20
# Runs that are alone less often are not worth a second copy of the encoder.
_FEWEST_ALONE = 8
# A step reads only one row of the embeddings and positions; the encoder computes the source's keys and values.
_NOT_READ = re.compile(r"dec\.(embed\.|pos$|layers\.\d+\.cross\.[kv]\.)")
_OF_ENCODER = re.compile(r"enc\.(?!embed\.|pos$)|dec\.layers\.\d+\.cross\.[kv]\.")
_MAX_HEADER_BYTES = 100_000_000


class Threads(NamedTuple):
    """CPU threads of one call."""

    encoder: int  # also for aligning
    decoder: int
    encoder_alone: int = 0  # most tokens of a batch, with padding, that the encoder reads on one thread
    decoder_alone: int = 0  # most tokens that the decoder reads in a step on one thread


def choose_threads(threads: int | Literal["auto"] | None, bundle: Bundle, *, is_shared: bool = False) -> Threads | None:
    """Choose the threads for a bundle; None lets ONNX Runtime choose.

    `is_shared`: whether the process has other threads of Python, such as those of a server.
    """
    if threads is None:
        return None
    if is_whole(threads):
        return Threads(int(threads), int(threads))
    cores = available_cores()
    if cores == 1:
        return Threads(1, 1)
    weight_bytes, step_bytes = 1 if bundle.manifest.quantization else 4, _step_bytes(bundle)
    encoder_alone, decoder, decoder_alone = ENCODER_ALONE * weight_bytes // max(_encoder_bytes(bundle), 1), cores, 0
    if bundle.manifest.spec.has_decoder and step_bytes < ONE_THREAD_BELOW:
        # More than two threads were not measured.
        decoder, decoder_alone = 2, max(DECODER_ALONE * weight_bytes // max(step_bytes, 1), 1)
    found = Threads(cores, decoder, encoder_alone if encoder_alone >= _FEWEST_ALONE else 0, decoder_alone)
    if not is_shared:
        return found
    # The others need cores between the short runs of a small model.
    return Threads(1 if found.encoder_alone else found.encoder, 1 if found.decoder_alone else found.decoder)


def _encoder_bytes(bundle: Bundle) -> int:
    if not _has_named_weights(bundle):
        return _all_bytes(bundle)
    return sum(size for name, size in _tensor_sizes(bundle.file(WEIGHTS)).items() if _OF_ENCODER.match(name))


def _step_bytes(bundle: Bundle) -> int:
    # Without names the step weights are unknown, so all weights count, including the encoder's.
    known = step_weight_bytes(bundle)
    return _all_bytes(bundle) if known is None else known


def _has_named_weights(bundle: Bundle) -> bool:
    return bundle.manifest.config is not None and WEIGHTS in bundle.manifest.files


def _all_bytes(bundle: Bundle) -> int:
    files = bundle.manifest.files
    return sum(files[name].bytes for name in (WEIGHTS, QUANTIZED_WEIGHTS) if name in files)


def step_weight_bytes(bundle: Bundle) -> int | None:
    """Return the bytes of weights that a step reads; None if they have no names."""
    config = bundle.manifest.config
    if config is None or not _has_named_weights(bundle):
        return None
    sizes = _tensor_sizes(bundle.file(WEIGHTS))
    read = sum(size for name, size in sizes.items() if name.startswith("dec.") and not _NOT_READ.match(name))
    if not config.tie_output:
        return read + sum(size for name, size in sizes.items() if name.startswith("out."))
    table = "enc.embed.weight" if config.tie_embeddings else "dec.embed.weight"
    tied = {name: size for name, size in sizes.items() if name == table or name.startswith(f"{table}.")}
    # If quantized for throughput, there are two tables, and only the one with int8 columns is multiplied.
    multiplied = {name: size for name, size in tied.items() if ".int8_columns." in name} or tied
    return read + sum(multiplied.values()) + sizes.get("out.bias", 0)


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Return the size of each tensor of a safetensors file; empty if it is damaged."""
    try:
        offsets = {name: tensor["data_offsets"] for name, tensor in tensor_header(path)[1].items()}
        return {name: int(end) - int(begin) for name, (begin, end) in offsets.items()}
    except (ValueError, TypeError, KeyError):
        return {}


def tensor_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and its tensors if any."""
    # A deployment machine has no safetensors library.
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0, {}
    return 8 + length, header


def available_cores(root: Path = _ROOT) -> int:
    """Count the cores that this process may use, within the limit of its container.

    After `share_cores` these are its share of them, but at least one.

    Two hyperthreads of a core count once, because they share its arithmetic units. A quota (`docker --cpus`,
    `limits.cpu` of Kubernetes) is rounded down, because a process that exceeds it is paused, and waiting threads count.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // _sharing)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({_read(root / siblings.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)})
    return max(1, int(min([cores, *_quotas(root)])) // _sharing)


def share_cores(processes: int) -> None:
    """Count only a share of the cores, if several processes of a server use them."""
    global _sharing  # noqa: PLW0603 - a fact about the process
    _sharing = processes


def instruction_sets() -> list[str]:
    """Return the CPU's vector instruction sets by NumPy's names, such as AVX512_ICL."""
    import numpy as np

    extensions = cast("dict[str, dict[str, list[str]]]", np.show_config(mode="dicts"))["SIMD Extensions"]
    return [*extensions["baseline"], *extensions.get("found", [])]


def _quotas(root: Path) -> Iterator[float]:
    # The limits of parent groups apply too.
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if not controllers:
                quota, _, period = _read(root / "sys/fs/cgroup" / group / "cpu.max").partition(" ")
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup/cpu" / group
                quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            else:
                break
            if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 set no limit
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
