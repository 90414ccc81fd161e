"""Write all graphs of a model and their shared weight file into a directory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from tfexport import contract
from tfexport.bundle.bundle import Bundle
from tfexport.contract import ENCODER, REORDER, WEIGHTS, AlignmentHeads, GraphEntry, GraphSpec, ModelSpec, Variant
from tfexport.errors import BundleError, GraphError, raise_all
from tfexport.export._module_probe import traits_of
from tfexport.export._trace import trace_alignment, trace_decoder, trace_encoder
from tfexport.export._weights import write_weights
from tfexport.export.decoders import VARIANTS
from tfexport.export.decoders.contrib import joint_weights
from tfexport.export.graph_file import save_graph
from tfexport.export.passes import append_selection, separate_bias, separate_lookups
from tfexport.export.ranking import rank_without_scores
from tfexport.export.reorder import reorder_model
from tfexport.export.shortlist import restrict
from tfexport.nn.directory import load_weights
from tfexport.precision import FLOAT, Precision

_REMEDY = "add the new option to a variant in tfexport/export/decoders"


def write_graphs(
    model: nn.Module,
    spec: ModelSpec,
    directory: Path,
    *,
    variants: Sequence[Variant],
    opset: int,
    alignment: AlignmentHeads | None = None,
    speculation: bool = False,
    shortlist: bool = False,
    always_portable: bool = True,
    tuned: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Trace a model, and write and check its graphs and their weight file.

    The model is in eval mode; a copy of it is cast to the precision of `spec`. Unsupported variants are skipped.
    With `shortlist`, the variants are contrib only. Without `always_portable`, the portable encoder is left out if no
    variant reads it. With `tuned`, the contrib decoder is adapted to the fp32 products of ONNX Runtime.
    """
    dtype = getattr(torch, FLOAT[spec.precision])
    shared = {id(parameter): parameter for parameter in model.parameters() if parameter.dtype == dtype}
    model = copy.deepcopy(model, shared).to(dtype)
    supported = _supported(variants, model, spec, report)
    if speculation and not spec.cache.grows:
        raise GraphError("speculation: a step cannot take tokens back from the states of this model; omit it")
    if speculation and "contrib" not in supported:
        raise GraphError("speculation: needs the contrib variant, which this export does not have; omit it")
    report("tracing the encoder")
    traced: dict[str, tuple[ir.Model, GraphSpec]] = {}
    if always_portable or ENCODER in {VARIANTS[variant].encoder for variant in supported} or not supported:
        traced[ENCODER] = trace_encoder(model, spec, opset), contract.encoder_graph(spec)
    portable = {ENCODER, contract.ALIGNMENT, REORDER}
    for variant in supported:
        report(f"tracing the decoder, {variant} variant")
        kind, name = VARIANTS[variant], contract.DECODER[variant]
        if kind.encoder not in traced:
            source = kind.whole_source if spec.source.fits(0) else kind.source
            traced[kind.encoder] = trace_encoder(model, spec, opset, source), contract.encoder_graph(spec)
        speculates = speculation and variant == "contrib"
        decoder = trace_decoder(model, spec, variant, kind.opset or opset, speculation=speculates)
        if shortlist:
            traced[contract.SHORTLIST] = restrict(decoder, spec), contract.shortlist_graph(spec)
        append_selection(decoder, by_blocks=variant == "contrib")
        traced[name] = decoder, contract.decoder_graph(spec, variant, speculation=speculates, shortlist=shortlist)
        portable |= {name} if kind.portable else set()
    if alignment is not None:
        report("tracing the alignment")
        traced[contract.ALIGNMENT] = trace_alignment(model, spec, alignment, opset), contract.alignment_graph(spec)
    report("writing graphs and weights")
    graphs = [graph for graph, _ in traced.values()]
    write_weights(directory / WEIGHTS, dict(model.named_parameters()), graphs, joint=list(joint_weights(model)))
    if "contrib" in supported:
        decoder = traced[contract.DECODER["contrib"]][0]
        if tuned:
            rank_without_scores(decoder)
            separate_bias(decoder)
        separate_lookups(decoder)
    if set(supported) - {"contrib"}:  # a GPU can run the other variants
        traced[REORDER] = reorder_model(spec.precision), contract.reorder_spec(spec.precision)
    written = {}
    for name, (graph, graph_spec) in traced.items():
        path = directory / f"{name}.onnx"
        save_graph(graph, path, graph_spec, portable=name in portable)
        written[name] = GraphEntry.of(path.name, graph.opset_imports[""], graph_spec)
    return written


def write_precision(
    bundle: Bundle,
    precision: Precision,
    variant: Variant | None,
    directory: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Rebuild the model of a bundle, cast it, and write its graphs and a weight file."""
    manifest = bundle.manifest
    if manifest.config is None or WEIGHTS not in manifest.files:
        raise BundleError(
            f"{bundle.path}: has graphs in {manifest.spec.precision} and no model to cast; "
            f"export it again with: tfexport onnx SOURCE --precision {precision}"
        )
    report(f"casting the model to {precision}")
    model = load_weights(bundle.file(WEIGHTS), manifest.config).to(getattr(torch, FLOAT[precision]))
    problems = [
        f"{name} is too large for {precision}"
        for name, parameter in model.named_parameters()
        if not parameter.isfinite().all()
    ]
    raise_all(GraphError, str(bundle.path), problems, remedy="use bf16 or fp32")
    spec = replace(manifest.spec, precision=precision)
    opset, variants = manifest.graphs[ENCODER].opset, () if variant is None else (variant,)
    graphs = write_graphs(model, spec, directory, variants=variants, opset=opset, report=report)
    graphs.pop(REORDER, None)  # each engine has its own graph
    return graphs


def _supported(
    variants: Sequence[Variant], model: nn.Module, spec: ModelSpec, report: Callable[[str], None]
) -> list[Variant]:
    """Return the requested variants that support the model and report the others."""
    traits = traits_of(model, spec)
    problems = {variant: VARIANTS[variant].supports(traits, spec.precision) for variant in VARIANTS}
    if not spec.has_decoder:  # traced as with the concat variant
        raise_all(GraphError, "encoder", problems["concat"], remedy=_REMEDY)
        return []
    reasons = [
        f"the {variant} variant does not support this model: {' and '.join(found)}"
        for variant in variants
        if (found := problems[variant])
    ]
    supported = [variant for variant in variants if not problems[variant]]
    if not supported:
        others = ",".join(variant for variant in VARIANTS if not problems[variant])
        remedy = f"export it with --variants {others}" if others else _REMEDY
        raise GraphError(*reasons, subject="decoder", remedy=remedy)
    for reason in reasons:
        report(reason)
    return supported
