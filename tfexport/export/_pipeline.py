"""Export a model as a verified bundle."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfexport._io.names import CARD, PROCESSOR, SHORTLIST_TABLE
from tfexport._io.signature import SigningKey
from tfexport._io.strict_json import render
from tfexport.bundle.bundle import PARITY, SIGNATURE_DROPPED, Bundle, create_bundle
from tfexport.bundle.card import render_card
from tfexport.bundle.manifest import Draft, Identity
from tfexport.bundle.status import proof_of
from tfexport.contract import GraphEntry
from tfexport.errors import BackendError, ConfigError, ParityError, raise_all
from tfexport.export._module_probe import check_module, traits_of
from tfexport.export._source import Source, open_source
from tfexport.export.config import ExportConfig
from tfexport.export.quantize.calibrate import calibrate
from tfexport.export.quantize.integers import fastest_variant, write_integer_graphs
from tfexport.export.quantize.qdq import quantize_graphs
from tfexport.export.shortlist import make_shortlist
from tfexport.export.write import write_graphs
from tfexport.importing.own_module import OwnModule
from tfexport.runtime.registry import Graphs
from tfexport.text.config import TextConfig
from tfexport.verify import Report, Stages, VerifyConfig, verify_stages


def export_bundle(
    source: str | OwnModule,
    output: Path,
    config: ExportConfig,
    *,
    identity: Identity | None = None,
    verify: bool = True,
    force: bool = False,
    sign_key: Path | None = None,
    calibration_texts: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Export a model as a bundle.

    Args:
        source: a model directory, "preset:NAME" for seeded random weights, or a user's own module: an `OwnModule`, or
            PACKAGE.MODULE:FACTORY, whose code is imported and run.
        output: directory to create.
        config: precision, decoder variants, opset and limits.
        identity: name and description of the bundle.
        verify: compare every stage with the eager model before anything appears at `output`.
        force: replace an existing bundle, which is kept until the new one is complete; its engines are kept too.
        sign_key: private key that signs the bundle; None leaves it unsigned.
        calibration_texts: texts whose decodes show the range of activations, for w8a8 and fp8; by default the recorded
            texts of the source.
        report: receives progress lines.

    Raises:
        ConfigError: the source or the key cannot be used, or the model lacks the layer or heads of the alignment.
        CheckpointError: weights, a tokenizer or the shortlist are missing, damaged or do not fit.
        GraphError: the model cannot be traced.
        BackendError: the precision cannot be verified on this machine.
        ParityError: a stage or a recorded text differs from the model; nothing is written.
        BundleError: the bundle cannot be written.
    """
    if verify and config.precision == "bf16":
        raise BackendError(
            "onnx: bf16 cannot be verified, because ONNX Runtime has no bfloat16 kernels on the CPU; "
            "use --precision fp16, or --no-verify to export for TensorRT without verification"
        )
    key = None if sign_key is None else SigningKey.read(sign_key)
    if isinstance(source, str):
        report(f"loading {source}")
    opened = open_source(source, config, report)
    shortlist = None if config.shortlist is None else make_shortlist(config.shortlist, opened)
    calibrated = _calibration_sources(opened, config, calibration_texts)
    if verify and opened.module:
        check_module(opened.model, opened.spec)
    if config.alignment:
        config = replace(config, alignment=config.alignment.within(opened.spec))
    with create_bundle(output, force=force, key=key) as builder:
        if builder.drops_signature:
            report(SIGNATURE_DROPPED)
        if shortlist is not None:
            (builder.path / SHORTLIST_TABLE).write_bytes(shortlist.to_bytes())
        graphs = _write(opened, builder.path, config, calibrated, report)
        for name, raw in opened.files.items():
            (builder.path / name).write_bytes(raw)
        verified = _verified(opened, builder.path, graphs, config, report) if verify else None
        quantization = config.quantization
        if quantization is not None:
            quantization = replace(quantization, calibration_texts=len(calibrated))
        proof = verified.proof if verified else proof_of(None, None)
        made_with = {name: importlib.metadata.version(name) for name in ("tfexport", "torch", "onnx", "onnxscript")}
        draft = Draft(
            spec=opened.spec,
            config=opened.config,
            graphs=graphs,
            versions={**opened.versions, **made_with},
            parity=verified.summary() if verified else None,
            quantization=quantization,
            text=opened.tokenizer.text if opened.tokenizer else TextConfig(),
            alignment=config.alignment,
            checkpoint=opened.checkpoint,
            provenance=replace(opened.provenance, status=proof.status, proof=proof.sentence),
            identity=identity or Identity(),
            module=opened.module,
        )
        has_processor = PROCESSOR in opened.files
        card = render_card(draft, has_tokenizer=opened.tokenizer is not None, has_processor=has_processor)
        (builder.path / CARD).write_text(card, encoding="utf-8")
        builder.finish(draft)
    for name in builder.stale_engines:
        report(f"engine {name} was built from other graphs and cannot be used; build it again or remove engines/{name}")
    return builder.bundle


# Name in earlier versions for exporting a user's own module.
export_module = export_bundle


def _calibration_sources(source: Source, config: ExportConfig, texts: Sequence[str]) -> list[list[int]]:
    if not config.is_calibrated:
        raise_all(ConfigError, "export", ["calibration texts are for w8a8 and fp8; leave them out"] if texts else [])
        return []
    tokenizer = source.tokenizer
    if tokenizer is None:
        problem = f"{config.precision} is calibrated on texts, and this model has no tokenizer"
        raise ConfigError(f"export: {problem}; use fp16")
    if texts:
        return tokenizer.encode(texts)
    longest = source.spec.max_source_length
    recorded = [list(sample.source_ids) for sample in tokenizer.text.samples if len(sample.source_ids) <= longest]
    if not recorded:
        problem = f"{config.precision} is calibrated on texts, and this model has no recorded texts"
        raise ConfigError(f"export: {problem}; give some hundred with --calibration-data")
    return recorded


def _write(
    source: Source,
    directory: Path,
    config: ExportConfig,
    calibrated: Sequence[Sequence[int]],
    report: Callable[[str], None],
) -> dict[str, GraphEntry]:
    module, spec, variants = source.model.module, source.spec, config.variants
    if config.shortlist is not None and variants != ("contrib",):
        variants = ("contrib",)
        report("writing only the contrib variant, because the others have no shortlists")
    options: Any = {name: getattr(config, name) for name in ("opset", "alignment", "speculation")}
    options |= {"shortlist": config.shortlist is not None, "report": report}
    if config.quantization is None:
        return write_graphs(module, spec, directory, variants=variants, tuned=True, **options)
    # In the bundle's directory, because the fp32 weights can be larger than /tmp.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        if config.is_calibrated:
            assert source.tokenizer is not None
            graphs = write_graphs(module, spec, Path(scratch), variants=config.variants, **options)
            prefix, method = source.tokenizer.text.target_prefix, config.calibration_method
            ranges = calibrate(Path(scratch), graphs, spec, calibrated, prefix, method, report=report)
            weights = config.quantization.weights
            return quantize_graphs(Path(scratch), graphs, directory, weights, ranges=ranges, report=report)
        fastest = fastest_variant(variants, traits_of(module, spec))
        if spec.has_decoder and (others := [variant for variant in variants if variant not in fastest]):
            left_out = " or ".join(others)
            report(f"writing only the {fastest[0]} variant, the fastest in {config.precision}, not {left_out}")
        graphs = write_graphs(module, spec, Path(scratch), variants=fastest, always_portable=False, **options)
        return write_integer_graphs(Path(scratch), graphs, directory, config.quantization, report=report)


def _verified(
    source: Source,
    directory: Path,
    graphs: Mapping[str, GraphEntry],
    config: ExportConfig,
    report: Callable[[str], None],
) -> Report:
    report("verifying")
    paths = {name: directory / graph.file for name, graph in graphs.items()}
    weights = config.quantization.precision if config.quantization else None
    opened = Graphs(paths, source.spec, weights, alignment=config.alignment)
    stages = Stages(source.model, opened, tokenizer=source.tokenizer)
    found = verify_stages(stages, VerifyConfig.quick(), report=report)
    if not found.passed:
        raise ParityError("onnx: " + "; ".join(found.problems()))
    (directory / PARITY).write_bytes(render(found.to_dict()))
    return found
