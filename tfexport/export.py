"""From a model directory or a preset to a verified bundle: the way through the house, read aloud."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tfexport.bundle.bundle import PARITY, Bundle, create_bundle
from tfexport.bundle.manifest import GraphEntry
from tfexport.errors import BackendError, ConfigError, ParityError, raise_all
from tfexport.files.names import TOKENIZER
from tfexport.files.sealed_json import render
from tfexport.graph.config import ExportConfig
from tfexport.graph.forms import FORMS
from tfexport.graph.quantize.ort_quantize import write_integer_graphs
from tfexport.graph.write import write_graphs
from tfexport.models.config import model_spec
from tfexport.models.directory import load_model
from tfexport.models.presets import build_preset
from tfexport.models.transformer import Transformer
from tfexport.runtime.registry import Graphs
from tfexport.spec import ENCODER, ENCODER_CONTRIB, FLOAT, Form, ModelSpec
from tfexport.tokenizer import Tokenizer
from tfexport.verify import Stages, VerifyConfig, verify_stages

PRESET = "preset:"


def export_bundle(
    source: str,
    output: Path,
    config: ExportConfig,
    *,
    verify: bool = True,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Export a model as a bundle.

    Args:
        source: a model directory, or "preset:NAME" for seeded random weights.
        output: directory to create.
        config: precision, forms, opset and limits.
        verify: compare every stage with the eager model before anything appears at `output`.
        force: replace a bundle that is there; it stays whole until the new one is.
        report: told what happens, a line at a time.

    Returns:
        The bundle, opened.

    Raises:
        ConfigError: the model cannot be had this way.
        CheckpointError: weights are missing, damaged or do not fit.
        GraphError: the model does not trace.
        BackendError: the precision cannot be verified on this machine.
        ParityError: a stage says something else than the eager model; nothing is written.
        BundleError: the bundle cannot be written.
    """
    if verify and config.precision == "bf16":
        raise BackendError(
            "onnx: bf16 cannot be verified here, ONNX Runtime has no bfloat16 kernels on the CPU; "
            "use --precision fp16, or --no-verify to export for TensorRT unverified"
        )
    report(f"loading {source}")
    model, tokenizer = _load(source, config.seed)
    model = _shorten(model, config)
    spec = model_spec(model.config, config.graph_precision)
    quantization = config.quantization
    if tokenizer is not None:
        Tokenizer.load(tokenizer, spec)
    with create_bundle(output, force=force) as builder:
        graphs = _write(model, spec, builder.path, config, report)
        if tokenizer is not None:
            (builder.path / TOKENIZER).write_bytes(tokenizer.read_bytes())
        parity = None
        if verify:
            report("verifying")
            paths = {name: builder.path / graph.file for name, graph in graphs.items()}
            written = Graphs(paths, spec, quantization.weights if quantization else None)
            found = verify_stages(Stages(model, written), VerifyConfig.quick(), report=report)
            if not found.passed:
                raise ParityError("onnx: " + "; ".join(found.problems()))
            (builder.path / PARITY).write_bytes(render(found.to_dict()))
            parity = found.summary()
        builder.finish(
            spec=spec,
            config=model.config,
            graphs=graphs,
            versions=_versions(),
            parity=parity,
            quantization=quantization,
        )
    return builder.bundle


def _load(source: str, seed: int) -> tuple[Transformer, Path | None]:
    if source.startswith(PRESET):
        return build_preset(source.removeprefix(PRESET), seed), None
    directory = Path(source)
    tokenizer = directory / TOKENIZER
    return load_model(directory), tokenizer if os.path.lexists(tokenizer) else None


def _shorten(model: Transformer, config: ExportConfig) -> Transformer:
    """Limit the lengths and cut the position tables to them, in place."""
    old, limits, problems = model.config, {}, []
    for name in ("max_source_length", "max_target_length"):
        wanted, most = getattr(config, name), getattr(old, name)
        if wanted is None:
            continue
        if most is None:
            problems.append(f"{name} is {wanted}, but the model is an encoder alone; leave it out")
        elif wanted > most and old.positions == "table":
            problems.append(f"{name} is {wanted}, above the model's position table of {most}; ask for {most} or less")
        else:
            limits[name] = wanted
    raise_all(ConfigError, "export", problems)
    if not limits:
        return model
    model.config = dataclasses.replace(old, **limits)
    for stack, rows in ((model.enc, model.config.max_source_length), (model.dec, model.config.max_target_length)):
        if stack is not None and stack.pos is not None:
            stack.pos = nn.Parameter(stack.pos[:rows].clone(), requires_grad=False)
    return model


def _write(
    model: Transformer, spec: ModelSpec, directory: Path, config: ExportConfig, report: Callable[[str], None]
) -> dict[str, GraphEntry]:
    def write(target: Path) -> dict[str, GraphEntry]:
        forms = _forms(model, spec, config)
        return write_graphs(_cast(model, spec), spec, target, forms=forms, opset=config.opset, report=report)

    if config.quantization is None:
        return write(directory)
    # On the disk of the bundle: the weights in fp32 can be larger than /tmp.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source = Path(scratch)
        graphs = write(source)
        if ENCODER_CONTRIB in graphs:
            del graphs[ENCODER]  # for decoders of the other forms, and there are none
        return write_integer_graphs(source, graphs, directory, config.quantization, report=report)


def _forms(model: Transformer, spec: ModelSpec, config: ExportConfig) -> tuple[Form, ...]:
    """Return the forms to write; of quantised graphs, which are for one runtime, only its fastest."""
    if config.quantization is None:
        return config.forms
    fastest: tuple[Form, ...] = ("contrib", "static", "concat")
    able = [form for form in fastest if not FORMS[form].supports(model.config, spec.precision)]
    return next(((form,) for form in able if form in config.forms), config.forms)


def _cast(model: Transformer, spec: ModelSpec) -> nn.Module:
    return copy.deepcopy(model).to(getattr(torch, FLOAT[spec.precision]))


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("tfexport", "torch", "onnx", "onnxscript")}
