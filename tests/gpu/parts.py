"""The parts of the acceptance, the most telling first: the test that each is, and what it needs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tfexport._io.extras import install_command, replacing_command
from tfexport.runtime.probes import find_gpus, run_probe
from tfexport.runtime.registry import backends

# "rtx-library" is the library alone, "tensorrt-rtx" one that takes the GPU.
Need = Literal[
    "gpu", "tensorrt", "rtx-library", "tensorrt-rtx", "ort", "ort-cuda", "torch-cuda", "export", "polygraphy"
]


@dataclass(frozen=True)
class Part:
    """One part of the acceptance, a test of this folder that `scripts/gpu-acceptance` runs in a process of its own.

    Attributes:
        name: of the part.
        test: its file and name.
        what: it shows, in words.
        needs: that it is skipped without.
        limit_s: after which it is given up.
    """

    name: str
    test: str
    what: str
    needs: tuple[Need, ...]
    limit_s: int


def _part(name: str, test: str, what: str, limit_s: int, *needs: Need) -> Part:
    return Part(name, f"test_{test}", what, ("export", *needs), limit_s)


def _on_both(name: str, file: str, what: str, limit_s: int, *more: Need) -> tuple[Part, Part]:
    test = f"{file}.py::test_{name}"
    return (
        _part(f"tensorrt-{name}", f"{test}[tensorrt]", f"TensorRT: {what}", limit_s, "gpu", "tensorrt", *more),
        _part(
            f"tensorrt-rtx-{name}",
            f"{test}[tensorrt-rtx]",
            f"TensorRT-RTX: {what}",
            limit_s,
            "gpu",
            "tensorrt-rtx",
            *more,
        ),
    )


PARTS: tuple[Part, ...] = (
    # With PyTorch alone: whether captures, overlapped steps and threads are right on a real GPU.
    _part(
        "engine-double",
        "engine_double.py::test_engine_double",
        "the session for TensorRT on engines of PyTorch: captures, overlapped steps, threads, memory",
        180,
        "torch-cuda",
        "ort",
    ),
    _part("eager-latency", "latency.py::test_eager_latency", "PyTorch eager: milliseconds a step", 90, "torch-cuda"),
    _part(
        "compile-latency",
        "latency.py::test_compile_latency",
        "PyTorch torch.compile: milliseconds a step",
        180,
        "torch-cuda",
    ),
    _part(
        "primitives",
        "primitives.py::test_primitives",
        "the bandwidth, replays of a graph, top-k, small copies",
        60,
        "torch-cuda",
    ),
    _part(
        "rtx-accepts",
        "parity.py::test_rtx_accepts",
        "TensorRT-RTX: whether it takes this GPU",
        90,
        "gpu",
        "rtx-library",
    ),
    *_on_both("dates", "parity", "models/dates against PyTorch, both forms, fp32, fp16 and bf16", 200),
    _part("ort-cuda", "parity.py::test_ort_cuda", "ONNX Runtime CUDA: models/dates against PyTorch", 120, "ort-cuda"),
    *_on_both("latency", "latency", "milliseconds a step, with CUDA graphs and without", 180),
    _part("ort-latency", "latency.py::test_ort_latency", "ONNX Runtime CUDA: milliseconds a step", 180, "ort-cuda"),
    _part(
        "double-latency",
        "latency.py::test_double_latency",
        "the session for TensorRT on engines of PyTorch: milliseconds a step",
        150,
        "torch-cuda",
        "ort",
    ),
    *_on_both("sessions", "sessions", "several sessions and threads over one engine", 60),
    *_on_both("refusals", "refusals", "stale, damaged and foreign engines, requests beyond a profile", 60),
    *_on_both("weights", "parity", "models/dates with int8 and int4 weights", 120),
    *_on_both("comparator", "parity", "the encoder beside ONNX Runtime, by Polygraphy", 60, "polygraphy"),
    _part(
        "ort-presets",
        "parity.py::test_ort_presets",
        "ONNX Runtime CUDA: random presets against PyTorch",
        120,
        "ort-cuda",
    ),
    _part("ort-ties", "ties.py::test_ties", "ONNX Runtime CUDA: equal logits in order of id", 60, "ort-cuda"),
    # Some forty builds, as many as the time allows: to run out of it is no failure, so they come last.
    *_on_both("presets", "parity", "random presets against PyTorch, both forms, fp32, fp16 and bf16", 3600),
)


def skipped(part: Part) -> str:
    """Say why a part cannot run here, or nothing when it can."""
    return next((reason for need in part.needs if (reason := missing(need))), "")


@functools.cache
def missing(need: Need) -> str:
    """Say why something is not there, or nothing where it is."""
    look: dict[Need, Callable[[], str]] = {
        "gpu": lambda: find_gpus()[1],
        "export": lambda: next(filter(None, map(_absent, ("torch", "onnx", "onnxscript", "safetensors"))), ""),
        "polygraphy": lambda: _absent("polygraphy"),
        "rtx-library": lambda: _absent("tensorrt_rtx"),
        "ort": lambda: _absent("onnxruntime"),
        "ort-cuda": lambda: _problem("onnxruntime", "cuda"),
        "torch-cuda": lambda: _problem("torch", "cpu") or missing("gpu") or _torch_without_cuda(),
        "tensorrt": lambda: _problem("tensorrt", "gpu"),
        "tensorrt-rtx": lambda: _problem("tensorrt-rtx", "gpu"),
    }
    return look[need]()


def _problem(library: str, device: str) -> str:
    """Try a library on a device as the doctor does, and say what is wrong."""
    backend, required = next((b, r) for b in backends() for r in b.requirements if r.name == library)
    without = f"{library} has no {device}; {replacing_command('gpu')}"
    return _absent(required.module) or run_probe(backend, required).get(device, without)


def _torch_without_cuda() -> str:
    import torch

    reason = "has no CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} finds no GPU that it runs"
    return (
        "" if torch.cuda.is_available() else f"torch {torch.__version__} {reason}; see https://pytorch.org/get-started"
    )


def _absent(module: str) -> str:
    """Say that a module is not installed, or nothing where it is."""
    remedy = f"; {install_command(module)}" if install_command(module) else ""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed{remedy}"
