"""From a model directory or a preset to a verified bundle: load, write the graphs, verify, seal the bundle."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfexport.bundle.bundle import PARITY, Bundle, create_bundle
from tfexport.bundle.manifest import GraphEntry
from tfexport.errors import BackendError, ConfigError, ParityError, raise_all
from tfexport.files.names import GENERATION, TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport.files.sealed_json import render
from tfexport.files.strict_json import read_json
from tfexport.generation import GenerationDefaults
from tfexport.graph.config import ExportConfig
from tfexport.graph.precision import write_cast
from tfexport.graph.quantize.ort_quantize import fastest_form, write_integer_graphs
from tfexport.models.config import model_spec
from tfexport.models.directory import load_model
from tfexport.models.lengths import shorten
from tfexport.models.presets import build_preset
from tfexport.models.transformer import Transformer
from tfexport.runtime.registry import Graphs
from tfexport.spec import ENCODER, ENCODER_CONTRIB, AlignmentHeads, Form, ModelSpec
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
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
        ConfigError: the model cannot be had this way, or lacks the layer or heads of the alignment.
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
    model, directory = _load(source, config)
    spec = model_spec(model.config, config.graph_precision)
    alignment = config.alignment.within(spec) if config.alignment else None
    texts = _text_files(directory) if directory else {}
    text = _read_text(directory) if directory and TOKENIZER in texts else TextConfig()
    tokenizer = _tokenizer(texts, spec, text)
    generation = _generation(directory, spec) if directory else None
    with create_bundle(output, force=force) as builder:
        graphs = _write(model, spec, builder.path, config, report, alignment)
        for name, file in texts.items():
            (builder.path / name).write_bytes(file.read_bytes())
        if generation is not None:
            (builder.path / GENERATION).write_bytes(render(generation.given()))
        parity = None
        if verify:
            paths = {name: builder.path / graph.file for name, graph in graphs.items()}
            weights = config.quantization.weights if config.quantization else None
            written = Graphs(paths, spec, weights, alignment=alignment)
            found = _verify(Stages(model, written, tokenizer=tokenizer), report)
            (builder.path / PARITY).write_bytes(render(found.to_dict()))
            parity = found.summary()
        builder.finish(
            spec=spec,
            config=model.config,
            graphs=graphs,
            versions={name: importlib.metadata.version(name) for name in ("tfexport", "torch", "onnx", "onnxscript")},
            parity=parity,
            quantization=config.quantization,
            text=text,
            alignment=alignment,
        )
    return builder.bundle


def _load(source: str, config: ExportConfig) -> tuple[Transformer, Path | None]:
    """Return the model, as long as it shall be, and its directory."""
    if source.startswith(PRESET):
        model, directory = build_preset(source.removeprefix(PRESET), config.seed), None
    else:
        model, directory = load_model(Path(source)), Path(source)
    shorten(model, config.max_source_length, config.max_target_length)
    return model, directory


def _text_files(directory: Path) -> dict[str, Path]:
    """Return the tokenizers of a model directory by their names."""
    paths = {name: directory / name for name in (TOKENIZER, TARGET_TOKENIZER)}
    return {name: path for name, path in paths.items() if os.path.lexists(path)}


def _read_text(directory: Path) -> TextConfig:
    """Read what surrounds the ids; directories from before there was such a file have nothing around them."""
    path = directory / TEXT
    return TextConfig.from_dict(read_json(path, TEXT), subject=TEXT) if os.path.lexists(path) else TextConfig()


def _tokenizer(files: Mapping[str, Path], spec: ModelSpec, text: TextConfig) -> Tokenizer | None:
    """Read the tokenizers, and compare them with the texts that were recorded beside them."""
    if TOKENIZER not in files:
        return None
    return Tokenizer.load(files[TOKENIZER], spec, target=files.get(TARGET_TOKENIZER), text=text)


def _generation(directory: Path, spec: ModelSpec) -> GenerationDefaults | None:
    """Return what a model directory says of generation, where it does."""
    path = directory / GENERATION
    if not os.path.lexists(path):
        return None
    defaults = GenerationDefaults.from_dict(read_json(path, str(path)), subject=str(path))
    raise_all(ConfigError, str(path), defaults.token_problems(spec.vocab))
    return defaults


def _write(
    model: Transformer,
    spec: ModelSpec,
    directory: Path,
    config: ExportConfig,
    report: Callable[[str], None],
    alignment: AlignmentHeads | None,
) -> dict[str, GraphEntry]:
    """Write the graphs and their weights, as they are or quantised."""

    def write(directory: Path, forms: Sequence[Form]) -> dict[str, GraphEntry]:
        return write_cast(model, spec, directory, forms=forms, opset=config.opset, alignment=alignment, report=report)

    if config.quantization is None:
        return write(directory, config.forms)
    # On the disk of the bundle: the weights in fp32 can be larger than /tmp.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        graphs = write(Path(scratch), fastest_form(config.forms, model.config))
        if ENCODER_CONTRIB in graphs:
            del graphs[ENCODER]  # for decoders of the other forms, and there are none
        return write_integer_graphs(Path(scratch), graphs, directory, config.quantization, report=report)


def _verify(stages: Stages, report: Callable[[str], None]) -> Report:
    report("verifying")
    found = verify_stages(stages, VerifyConfig.quick(), report=report)
    if not found.passed:
        raise ParityError("onnx: " + "; ".join(found.problems()))
    return found
