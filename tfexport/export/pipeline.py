"""From a model to a verified bundle: open it, write the graphs, verify, seal the bundle."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tfexport._io.sealed_json import render
from tfexport._io.signature import SigningKey
from tfexport.bundle.bundle import PARITY, SIGNATURE_DROPPED, Bundle, create_bundle
from tfexport.bundle.manifest import Draft, Identity
from tfexport.contract import ENCODER, ENCODER_CONTRIB, AlignmentHeads, Form, GraphEntry
from tfexport.errors import BackendError, ParityError
from tfexport.export.config import ExportConfig
from tfexport.export.precision import write_cast
from tfexport.export.quantize.ort_quantize import fastest_form, write_integer_graphs
from tfexport.export.seam import traits_of
from tfexport.export.source import Source, of_module, open_source
from tfexport.importing.own_module import OwnModule
from tfexport.runtime.registry import Graphs
from tfexport.text.config import TextConfig
from tfexport.verify import Report, Stages, VerifyConfig, verify_stages


def export_bundle(
    source: str,
    output: Path,
    config: ExportConfig,
    *,
    identity: Identity | None = None,
    verify: bool = True,
    force: bool = False,
    sign_key: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Export a model as a bundle.

    Args:
        source: a model directory, "preset:NAME" for seeded random weights, or PACKAGE.MODULE:FACTORY for a module of
            the user's own, whose code is imported and run.
        output: directory to create.
        config: precision, forms, opset and limits.
        identity: what to call the bundle; None says nothing.
        verify: compare every stage with the eager model before anything appears at `output`.
        force: replace a bundle that is there; it stays whole until the new one is, and its engines are kept.
        sign_key: private key that signs the bundle; None leaves it unsigned.
        report: told what happens, a line at a time.

    Returns:
        The bundle, opened.

    Raises:
        ConfigError: the model cannot be had this way, or lacks the layer or heads of the alignment, or the key is none.
        CheckpointError: weights are missing, damaged or do not fit.
        GraphError: the model does not trace.
        BackendError: the precision cannot be verified on this machine.
        ParityError: a stage says something else than the eager model; nothing is written.
        BundleError: the bundle cannot be written.
    """
    key = _checked(config, verify, sign_key)
    report(f"loading {source}")
    return _export(open_source(source, config, report), output, config, identity, verify, force, key, report)


def export_module(
    own: OwnModule,
    output: Path,
    config: ExportConfig,
    *,
    identity: Identity | None = None,
    verify: bool = True,
    force: bool = False,
    sign_key: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Export a module of the user's own as a bundle; see `export_bundle`.

    Args:
        own: the module, its specification, its reference and its tokenizers.
        output: directory to create.
        config: precision, forms, opset and limits.
        identity: what to call the bundle.
        verify: compare every stage with the module's reference.
        force: replace a bundle that is there.
        sign_key: private key that signs the bundle.
        report: told what happens, a line at a time.

    Raises:
        CheckpointError: a tokenizer cannot be read, or a text cannot be recorded.
        ParityError: a tokenizer differs from a recorded text, or a stage from the reference; nothing is written.
    """
    key = _checked(config, verify, sign_key)
    return _export(of_module(own, config, report), output, config, identity, verify, force, key, report)


def _checked(config: ExportConfig, verify: bool, sign_key: Path | None) -> SigningKey | None:
    """Refuse what cannot be done before anything is loaded; return the key."""
    if verify and config.precision == "bf16":
        raise BackendError(
            "onnx: bf16 cannot be verified here, ONNX Runtime has no bfloat16 kernels on the CPU; "
            "use --precision fp16, or --no-verify to export for TensorRT unverified"
        )
    return None if sign_key is None else SigningKey.read(sign_key)


def _export(
    source: Source,
    output: Path,
    config: ExportConfig,
    identity: Identity | None,
    verify: bool,
    force: bool,
    key: SigningKey | None,
    report: Callable[[str], None],
) -> Bundle:
    """Write the graphs of a source, verify them, and seal the bundle."""
    alignment = config.alignment.within(source.spec) if config.alignment else None
    with create_bundle(output, force=force, key=key) as builder:
        if builder.drops_signature:
            report(SIGNATURE_DROPPED)
        graphs = _write(source, builder.path, config, report, alignment)
        for name, raw in source.files.items():
            (builder.path / name).write_bytes(raw)
        parity = None
        if verify:
            paths = {name: builder.path / graph.file for name, graph in graphs.items()}
            weights = config.quantization.weights if config.quantization else None
            written = Graphs(paths, source.spec, weights, alignment=alignment)
            found = _verify(Stages(source.model, written, tokenizer=source.tokenizer), report)
            (builder.path / PARITY).write_bytes(render(found.to_dict()))
            parity = found.summary()
        made_with = {name: importlib.metadata.version(name) for name in ("tfexport", "torch", "onnx", "onnxscript")}
        draft = Draft(
            spec=source.spec,
            config=source.config,
            graphs=graphs,
            versions={**source.versions, **made_with},
            parity=parity,
            quantization=config.quantization,
            text=source.tokenizer.text if source.tokenizer else TextConfig(),
            alignment=alignment,
            checkpoint=source.checkpoint,
            provenance=source.provenance,
            identity=identity or Identity(),
            module=source.module,
        )
        builder.finish(draft)
    for name in builder.stale_engines:
        report(
            f"engine {name} was built from other graphs and may not be used; build it again, or remove engines/{name}"
        )
    return builder.bundle


def _write(
    source: Source,
    directory: Path,
    config: ExportConfig,
    report: Callable[[str], None],
    alignment: AlignmentHeads | None,
) -> dict[str, GraphEntry]:
    """Write the graphs and their weights, as they are or quantised."""

    def write(directory: Path, forms: Sequence[Form]) -> dict[str, GraphEntry]:
        module, opset = source.model.module, config.opset
        return write_cast(
            module,
            source.spec,
            directory,
            forms=forms,
            opset=opset,
            alignment=alignment,
            speculation=config.speculation,
            report=report,
        )

    if config.quantization is None:
        return write(directory, config.forms)
    # On the disk of the bundle: the weights in fp32 can be larger than /tmp.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        graphs = write(Path(scratch), fastest_form(config.forms, traits_of(source.model.module, source.spec)))
        if ENCODER_CONTRIB in graphs:
            del graphs[ENCODER]  # for decoders of the other forms, and there are none
        return write_integer_graphs(Path(scratch), graphs, directory, config.quantization, report=report)


def _verify(stages: Stages, report: Callable[[str], None]) -> Report:
    report("verifying")
    found = verify_stages(stages, VerifyConfig.quick(), report=report)
    if not found.passed:
        raise ParityError("onnx: " + "; ".join(found.problems()))
    return found
