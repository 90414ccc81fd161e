"""Who takes a step: each opens the same seeded model in a session, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwise.cells import Device
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.bundle.step_weights import step_weight_bytes
from tfexport.errors import BenchError
from tfexport.runtime.registry import OpenOptions, open_session
from tfexport.runtime.session import Session
from tfexport.spec import FLOAT, Form, Precision
from tfexport.trt.config import EngineConfig, Target


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a model is opened.

    Attributes:
        model: name of a preset.
        precision: of weights and activations.
        device: to run on.
        max_batch: the largest batch that comes.
        work: folder of bundles, which are made when they are first needed.
    """

    model: str
    precision: Precision
    device: Device
    max_batch: int
    work: Path

    def bundle(self) -> Bundle:
        """Return the model as a bundle."""
        path = self.work / f"{self.model}-{self.precision}"
        if not path.exists():
            from tfexport.export import export_bundle
            from tfexport.graph.config import ExportConfig

            config = ExportConfig(precision=self.precision, forms=("concat", "static"))
            export_bundle(f"preset:{self.model}", path, config, verify=False)
        return open_bundle(path)


@dataclass(frozen=True)
class Opened:
    """A contender that is ready.

    Attributes:
        session: to decode with.
        weight_bytes: that each of its steps reads.
    """

    session: Session
    weight_bytes: int


def _eager(opening: Opening, *, compiled: bool = False) -> Opened:
    import torch

    from tfexport.models.config import model_spec
    from tfexport.models.presets import build_preset
    from tfexport.runtime.eager import EagerSession

    model: Any = build_preset(opening.model).to(device=opening.device, dtype=getattr(torch, FLOAT[opening.precision]))
    read = _parameter_bytes(model)
    if compiled:
        # Else a probability of dropout is a number that may change, whose comparison ends the graph in each attention.
        torch._dynamo.config.specialize_float = True
        model.decode_step = torch.compile(model.decode_step, dynamic=True)
    return Opened(EagerSession(model, model_spec(model.config, opening.precision)), read)


def _parameter_bytes(model: Any) -> int:
    """Return the bytes of parameters that a step reads, as `step_weight_bytes` does of a bundle."""
    unread = ("dec.embed.", "dec.pos", ".cross.k.", ".cross.v.")
    named = model.named_parameters(remove_duplicate=False)
    read = {n: p for n, p in named if n.startswith(("dec.", "out.")) and not any(part in n for part in unread)}
    return sum(parameter.numel() * parameter.element_size() for parameter in read.values())


def _ort(opening: Opening, form: Form) -> Opened:
    bundle = opening.bundle()
    return _opened(bundle, open_session(bundle, "ort", OpenOptions(form=form, device=opening.device)))


def _engine(opening: Opening, target: Target) -> Opened:
    if opening.device != "cuda":
        raise BenchError("engines run on a GPU alone")
    from tfexport.build import build_engines, resolve_build
    from tfexport.bundle.manifest import ENGINES
    from tfexport.trt.config import engine_key

    path = opening.bundle().path
    config = EngineConfig(target=target, form="static", max_batch=opening.max_batch)
    name = engine_key(resolve_build(path, config).config)
    if not (path / ENGINES / name).exists():
        build_engines(path, config)
    bundle = open_bundle(path)
    return _opened(bundle, open_session(bundle, "trt", OpenOptions(engine=name)))


def _opened(bundle: Bundle, session: Session) -> Opened:
    read = step_weight_bytes(bundle)
    assert read is not None  # a preset has a configuration
    return Opened(session, read)


# The first is what outputs and times are compared with.
CONTENDERS: dict[str, Callable[[Opening], Opened]] = {
    "eager": _eager,
    "torch.compile": lambda opening: _eager(opening, compiled=True),
    "ort static": lambda opening: _ort(opening, "static"),
    "ort concat": lambda opening: _ort(opening, "concat"),
    "tensorrt": lambda opening: _engine(opening, "tensorrt"),
    "tensorrt-rtx": lambda opening: _engine(opening, "tensorrt-rtx"),
}
