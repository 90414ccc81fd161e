"""From a model directory or a preset to a verified bundle: load, write the graphs, verify, seal the bundle."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tfexport.bundle.bundle import PARITY, Bundle, create_bundle
from tfexport.bundle.manifest import GraphEntry
from tfexport.errors import BackendError, ParityError
from tfexport.files.names import TOKENIZER
from tfexport.files.sealed_json import render
from tfexport.graph.config import ExportConfig
from tfexport.graph.precision import write_cast
from tfexport.graph.quantize.ort_quantize import fastest_form, write_integer_graphs
from tfexport.models.config import model_spec
from tfexport.models.directory import load_model
from tfexport.models.lengths import shorten
from tfexport.models.presets import build_preset
from tfexport.models.transformer import Transformer
from tfexport.runtime.registry import Graphs
from tfexport.spec import ENCODER, ENCODER_CONTRIB, ModelSpec
from tfexport.tokenizer import Tokenizer
from tfexport.verify import Report, Stages, VerifyConfig, verify_stages

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
    model, tokenizer = _load(source, config)
    spec = model_spec(model.config, config.graph_precision)
    if tokenizer is not None:
        Tokenizer.load(tokenizer, spec)
    with create_bundle(output, force=force) as builder:
        graphs = _write(model, spec, builder.path, config, report)
        if tokenizer is not None:
            (builder.path / TOKENIZER).write_bytes(tokenizer.read_bytes())
        parity = None
        if verify:
            paths = {name: builder.path / graph.file for name, graph in graphs.items()}
            written = Graphs(paths, spec, config.quantization.weights if config.quantization else None)
            found = _verify(model, written, report)
            (builder.path / PARITY).write_bytes(render(found.to_dict()))
            parity = found.summary()
        builder.finish(
            spec=spec,
            config=model.config,
            graphs=graphs,
            versions={name: importlib.metadata.version(name) for name in ("tfexport", "torch", "onnx", "onnxscript")},
            parity=parity,
            quantization=config.quantization,
        )
    return builder.bundle


def _load(source: str, config: ExportConfig) -> tuple[Transformer, Path | None]:
    """Return the model, as long as it shall be, and its tokenizer."""
    if source.startswith(PRESET):
        model, tokenizer = build_preset(source.removeprefix(PRESET), config.seed), None
    else:
        model, tokenizer = load_model(Path(source)), Path(source) / TOKENIZER
    shorten(model, config.max_source_length, config.max_target_length)
    return model, tokenizer if tokenizer and os.path.lexists(tokenizer) else None


def _write(
    model: Transformer, spec: ModelSpec, directory: Path, config: ExportConfig, report: Callable[[str], None]
) -> dict[str, GraphEntry]:
    """Write the graphs and their weights, as they are or quantised."""
    if config.quantization is None:
        return write_cast(model, spec, directory, forms=config.forms, opset=config.opset, report=report)
    # On the disk of the bundle: the weights in fp32 can be larger than /tmp.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        forms = fastest_form(config.forms, model.config)
        graphs = write_cast(model, spec, Path(scratch), forms=forms, opset=config.opset, report=report)
        if ENCODER_CONTRIB in graphs:
            del graphs[ENCODER]  # for decoders of the other forms, and there are none
        return write_integer_graphs(Path(scratch), graphs, directory, config.quantization, report=report)


def _verify(model: Transformer, written: Graphs, report: Callable[[str], None]) -> Report:
    report("verifying")
    found = verify_stages(Stages(model, written), VerifyConfig.quick(), report=report)
    if not found.passed:
        raise ParityError("onnx: " + "; ".join(found.problems()))
    return found
