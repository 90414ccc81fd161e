"""List the parts of the GPU acceptance, the most important first, and their requirements."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tfexport._io.extras import install_command, replacing_command
from tfexport.precision import Precision
from tfexport.runtime.probes import find_gpus, run_probe
from tfexport.runtime.registry import backends
from tfexport.tensorrt.config import Target

# Environment variables of a part's process: the folder that parts share, and the file for checks.
WORK, FOUND = "GPU_WORK", "GPU_FOUND"
# "rtx-library" is the library by itself, "tensorrt-rtx" one that supports the GPU.
Need = Literal["gpu", "tensorrt", "rtx-library", "tensorrt-rtx", "ort", "ort-cuda", "torch-cuda", "export"]


@dataclass(frozen=True)
class Part:
    """One part of the acceptance; `scripts/gpu-acceptance` runs it in its own process."""

    name: str
    where: str  # module and function in this folder, such as "parity.dates"
    what: str
    limit_s: int  # of one run; the next one goes on
    needs: tuple[Need, ...]  # the part is skipped without them
    arguments: tuple[str, ...] = ()  # of the function after the job

    @property
    def test(self) -> str:
        return f"test_parts.py::test_part[{self.name}]"

    def run(self, job: Any) -> None:
        module, _, function = self.where.partition(".")
        getattr(importlib.import_module(f"tests.gpu.{module}"), function)(job, *self.arguments)


def _on_both(where: str, what: str, limit_s: int, *arguments: str) -> list[Part]:
    name = "-".join([where.partition(".")[2].replace("_", "-"), *arguments])
    return [
        Part(f"{target}-{name}", where, f"{_TITLES[target]}: {what}", limit_s, ("gpu", target), (target, *arguments))
        for target in get_args(Target)
    ]


def _latency(name: str, what: str, limit_s: int, precision: Precision, *needs: Need) -> Part:
    where = f"latency.{name.replace('-', '_')}"
    return Part(f"{name}-{precision}", where, f"{what}, {precision}: milliseconds a step", limit_s, needs, (precision,))


def _large(name: str, what: str, limit_s: int, *needs: Need, target: Target | None = None) -> Part:
    arguments = (name.replace("-", "_"), *([target] if target else []), "fp16")
    what = f"{what}, fp16, the size of BART-large-CNN: milliseconds a step"
    return Part(f"large-{target or name}", "latency.large", what, limit_s, needs, arguments)


_TITLES: dict[Target, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_DOUBLE = "the session for TensorRT on engines of PyTorch"
_GRAPHS = "milliseconds a step, with CUDA graphs and without"

# The limits of the lines until "what follows" fill four runs of nine minutes on a machine with one of TensorRT and
# TensorRT-RTX.
PARTS: tuple[Part, ...] = (
    Part("primitives", "primitives.primitives", "bandwidth, replays, top-k, small copies", 50, ("torch-cuda",)),
    Part("ort-cuda", "parity.ort_cuda", "ONNX Runtime CUDA: models/dates against PyTorch", 100, ("ort-cuda",)),
    Part("rtx-accepts", "parity.rtx_accepts", "TensorRT-RTX: GPU support", 50, ("gpu", "rtx-library")),
    *_on_both("parity.dates", "models/dates against PyTorch, both variants, fp32, fp16 and bf16", 200),
    _latency("eager-latency", "PyTorch eager", 60, "fp16", "torch-cuda"),
    _latency("ort-latency", "ONNX Runtime CUDA", 100, "fp16", "ort-cuda"),
    *_on_both("latency.latency", _GRAPHS, 200, "fp16"),
    _latency("compile-latency", "PyTorch torch.compile", 240, "fp16", "torch-cuda"),
    _large("eager-latency", "PyTorch eager", 60, "torch-cuda"),
    _large("ort-latency", "ONNX Runtime CUDA", 160, "ort-cuda"),
    *(_large("latency", titles, 240, "gpu", target, target=target) for target, titles in _TITLES.items()),
    _large("compile-latency", "PyTorch torch.compile", 150, "torch-cuda"),
    *_on_both("parity.calibrated", "models/dates in w8a8 and fp8", 120),
    *_on_both("behavior.observed", "the inspector's layers, and their times", 60),
    *_on_both("behavior.debug", "trt --debug: a planted overflow", 120),
    *_on_both("behavior.replicas", "replicas of a server over GPUs", 60),
    *_on_both("behavior.sessions", "several sessions and threads over one engine", 60),
    *_on_both("behavior.refusals", "stale, damaged and foreign engines, requests beyond a profile", 60),
    # What follows has no end in sight, or is rarely asked for.
    Part(
        "engine-double",
        "test_engine_double.engine_double",
        f"{_DOUBLE}: captures, overlapped steps, threads, memory",
        180,
        ("torch-cuda", "ort"),
    ),
    _latency("double-latency", _DOUBLE, 90, "fp16", "torch-cuda", "ort"),
    Part("ort-ties", "behavior.ties", "ONNX Runtime CUDA: equal logits in order of id", 60, ("ort-cuda",)),
    *_on_both("parity.weights", "models/dates with int8 and int4 weights", 120),
    *_on_both("latency.weights_latency", f"{_GRAPHS}, weights int8", 240),
    _latency("ort-latency", "ONNX Runtime CUDA", 120, "fp32", "ort-cuda"),
    *_on_both("latency.latency", _GRAPHS, 240, "fp32"),
    _latency("double-latency", _DOUBLE, 120, "fp32", "torch-cuda", "ort"),
    _latency("eager-latency", "PyTorch eager", 90, "fp32", "torch-cuda"),
    Part("ort-presets", "parity.ort_presets", "ONNX Runtime CUDA: random presets against PyTorch", 300, ("ort-cuda",)),
    _latency("compile-latency", "PyTorch torch.compile", 360, "fp32", "torch-cuda"),
    # Some forty builds.
    *_on_both("parity.presets", "random presets against PyTorch, both variants, fp32, fp16 and bf16", 3600),
)


def skipped(part: Part) -> str:
    """Return why a part cannot run here; empty if it can."""
    needs: tuple[Need, ...] = ("export", *part.needs)
    return next((reason for need in needs if (reason := missing(need))), "")


@functools.cache
def missing(need: Need) -> str:
    """Return why something is not usable here; empty if it is."""
    look: dict[Need, Callable[[], str]] = {
        "gpu": lambda: find_gpus()[1],
        "export": lambda: next(filter(None, map(_absent, ("torch", "onnx", "onnxscript", "safetensors"))), ""),
        "rtx-library": lambda: _absent("tensorrt_rtx"),
        "ort": lambda: _absent("onnxruntime"),
        "ort-cuda": lambda: _problem("onnxruntime", "cuda"),
        "torch-cuda": lambda: _problem("torch", "cpu") or missing("gpu") or _torch_without_cuda(),
        "tensorrt": lambda: _problem("tensorrt", "gpu"),
        "tensorrt-rtx": lambda: _problem("tensorrt-rtx", "gpu"),
    }
    return look[need]()


def _problem(library: str, device: str) -> str:
    # As the doctor does.
    backend, required = next((b, r) for b in backends() for r in b.requirements if r.name == library)
    without = f"{library} has no {device}; {replacing_command('gpu')}"
    return _absent(required.module) or run_probe(backend, required).get(device, without)


def _torch_without_cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    reason = "has no CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} finds no GPU that it runs"
    return f"torch {torch.__version__} {reason}; see https://pytorch.org/get-started"


def _absent(module: str) -> str:
    remedy = f"; {install_command(module)}" if install_command(module) else ""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed{remedy}"
