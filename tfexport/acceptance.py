"""What scripts/gpu-acceptance tries on a machine with a GPU: its parts, the most telling first, and what each needs.

The doctor reads the same list, to say beforehand what would be skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# "rtx-library" is the library alone, "tensorrt-rtx" one that takes the GPU.
Need = Literal["gpu", "tensorrt", "rtx-library", "tensorrt-rtx", "ort-cuda", "torch-cuda", "export", "polygraphy"]


@dataclass(frozen=True)
class Part:
    """One part of the acceptance, which runs in a process of its own.

    Attributes:
        name: of the part, and of the function that runs it.
        what: it shows, in words.
        needs: that it is skipped without.
        limit_s: after which it is given up.
    """

    name: str
    what: str
    needs: tuple[Need, ...]
    limit_s: int


def _on_both(name: str, what: str, limit_s: int, *more: Need) -> tuple[Part, Part]:
    return (
        Part(f"tensorrt-{name}", f"TensorRT: {what}", ("gpu", "export", "tensorrt", *more), limit_s),
        Part(f"tensorrt-rtx-{name}", f"TensorRT-RTX: {what}", ("gpu", "export", "tensorrt-rtx", *more), limit_s),
    )


PARTS: tuple[Part, ...] = (
    Part("rtx-accepts", "TensorRT-RTX: whether it takes this GPU", ("gpu", "export", "rtx-library"), 90),
    *_on_both("dates", "models/dates against PyTorch, both forms, fp32, fp16 and bf16", 200),
    Part("ort-cuda", "ONNX Runtime CUDA: models/dates against PyTorch", ("export", "ort-cuda"), 120),
    *_on_both("latency", "milliseconds a decode, with CUDA graphs and without", 150),
    Part("ort-latency", "ONNX Runtime CUDA: milliseconds a decode", ("export", "ort-cuda"), 90),
    Part("eager-latency", "PyTorch eager: milliseconds a decode", ("export", "torch-cuda"), 60),
    Part("compile-latency", "PyTorch torch.compile: milliseconds a decode", ("export", "torch-cuda"), 120),
    *_on_both("sessions", "several sessions and threads over one engine", 60),
    *_on_both("refusals", "stale, damaged and foreign engines, requests beyond a profile", 60),
    *_on_both("weights", "models/dates with int8 and int4 weights", 120),
    *_on_both("comparator", "the encoder beside ONNX Runtime, by Polygraphy", 60, "polygraphy"),
    Part("ort-presets", "ONNX Runtime CUDA: random presets against PyTorch", ("export", "ort-cuda"), 120),
    # Some forty builds, as many as the time allows: to run out of it is no failure, so they come last.
    *_on_both("presets", "random presets against PyTorch, both forms, fp32, fp16 and bf16", 3600),
)


def skipped(part: Part, missing: Mapping[Need, str]) -> str:
    """Say why a part cannot run, or nothing when it can.

    Args:
        part: one of `PARTS`.
        missing: why something is not there, by what it is; empty or absent where it is.
    """
    return next((missing[need] for need in part.needs if missing.get(need)), "")
