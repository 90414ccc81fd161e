"""Write all graphs of a model and their shared weight file into a directory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from tfexport.bundle.bundle import Bundle
from tfexport.contract import (
    ALIGNMENT,
    CONCAT_OPSETS,
    DECODER,
    ENCODER,
    REORDER,
    WEIGHTS,
    AlignmentHeads,
    Form,
    GraphEntry,
    GraphSpec,
    ModelSpec,
    alignment_graph,
    decoder_graph,
    encoder_graph,
    reorder_spec,
)
from tfexport.errors import BundleError, GraphError, raise_all
from tfexport.export._graph_file import save_graph
from tfexport.export._module_probe import traits_of
from tfexport.export._trace import trace_alignment, trace_decoder, trace_encoder
from tfexport.export._weights import write_weights
from tfexport.export.decoders import FORMS, ModuleTraits
from tfexport.export.decoders.contrib import joint_weights
from tfexport.export.passes import append_selection, separate_lookups
from tfexport.export.reorder import reorder_model
from tfexport.nn.config import TransformerConfig
from tfexport.nn.directory import load_weights
from tfexport.precision import FLOAT, Precision

_REMEDY = "list what is new in tfexport/export/decoders"


def write_graphs(
    model: nn.Module,
    spec: ModelSpec,
    directory: Path,
    *,
    forms: Sequence[Form],
    opset: int,
    alignment: AlignmentHeads | None = None,
    speculation: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Trace a model, and write and check its graphs and their weight file.

    Args:
        model: in eval mode; a copy of it is cast to the precision of `spec`.
        spec: of the model.
        directory: receives `NAME.onnx` for each graph and the weight file.
        forms: variants of the decoder; those that do not support the model are skipped. Not used for an encoder-only
            model.
        opset: of the encoder and the concat variant.
        alignment: layer and heads, as `AlignmentHeads.within` returns them; None for no alignment graph.
        speculation: let the contrib variant return the logits of several positions.
        report: receives progress lines.

    Raises:
        GraphError: the model cannot be traced, no requested variant supports it, or a graph violates the contract.
    """
    dtype = getattr(torch, FLOAT[spec.precision])
    shared = {id(parameter): parameter for parameter in model.parameters() if parameter.dtype == dtype}
    model = copy.deepcopy(model, shared).to(dtype)
    possible = _possible(forms, traits_of(model, spec), spec, report)
    if speculation and "contrib" not in possible:
        raise GraphError("speculation: needs the contrib form, which this export does not have; leave it out")
    report("tracing the encoder")
    traced: dict[str, tuple[ir.Model, GraphSpec, int]] = {
        ENCODER: (trace_encoder(model, spec, opset), encoder_graph(spec), opset)
    }
    portable = {ENCODER, ALIGNMENT}
    for form in possible:
        report(f"tracing the decoder, {form} form")
        kind = FORMS[form]
        if kind.encoder not in traced:
            traced[kind.encoder] = (trace_encoder(model, spec, opset, kind.source), encoder_graph(spec), opset)
        keeps = speculation and form == "contrib"
        decoder = trace_decoder(model, spec, form, kind.opset or opset, speculation=keeps)
        append_selection(decoder)
        traced[DECODER[form]] = (decoder, decoder_graph(spec, form, speculation=keeps), kind.opset or opset)
        portable |= {DECODER[form]} if kind.portable else set()
    if alignment is not None:
        report("tracing the alignment")
        traced[ALIGNMENT] = (trace_alignment(model, spec, alignment, opset), alignment_graph(spec), opset)
    report("writing graphs and weights")
    graphs = [graph for graph, *_ in traced.values()]
    write_weights(directory / WEIGHTS, dict(model.named_parameters()), graphs, joint=list(joint_weights(model)))
    if "contrib" in possible:
        separate_lookups(traced[DECODER["contrib"]][0])
    if set(possible) - {"contrib"}:  # a GPU can run the other variants
        traced[REORDER] = (reorder_model(spec.precision), reorder_spec(spec.precision), CONCAT_OPSETS[0])
        portable.add(REORDER)
    written = {}
    for name, (graph, contract, graph_opset) in traced.items():
        path = directory / f"{name}.onnx"
        save_graph(graph, path, contract, portable=name in portable)
        written[name] = GraphEntry.of(path.name, graph_opset, contract)
    return written


def write_precision(
    bundle: Bundle,
    precision: Precision,
    form: Form | None,
    directory: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Rebuild the model of a bundle, cast it and write its graphs and a weight file.

    Casting to a wider precision than the bundle's does not restore the lost digits. `form` is the only variant of the
    decoder to write; None for an encoder-only model.

    Raises:
        BundleError: the bundle has only graphs.
        CheckpointError: the weights do not fit the model.
        GraphError: lists every weight that is too large for the precision.
    """
    manifest = bundle.manifest
    if manifest.config is None or WEIGHTS not in manifest.files:
        raise BundleError(
            f"{bundle.path}: holds graphs in {manifest.spec.precision} and no model to cast; "
            f"export it again with: tfexport onnx SOURCE --precision {precision}"
        )
    report(f"casting the model to {precision}")
    model = load_weights(bundle.file(WEIGHTS), manifest.config).to(getattr(torch, FLOAT[precision]))
    problems = [
        f"{name} is too large for {precision}, use bf16 or fp32"
        for name, parameter in model.named_parameters()
        if not parameter.isfinite().all()
    ]
    raise_all(GraphError, str(bundle.path), problems)
    spec = replace(manifest.spec, precision=precision)
    opset, forms = manifest.graphs[ENCODER].opset, () if form is None else (form,)
    graphs = write_graphs(model, spec, directory, forms=forms, opset=opset, report=report)
    graphs.pop(REORDER, None)  # each engine has its own graph
    return graphs


def _possible(
    forms: Sequence[Form],
    traits: TransformerConfig | ModuleTraits,
    spec: ModelSpec,
    report: Callable[[str], None],
) -> list[Form]:
    """Return the variants that support the model and report the others.

    An encoder-only model has no variants; its graph is traced as with the concat variant.
    """
    if not spec.has_decoder:
        if unknown := FORMS["concat"].supports(traits, spec.precision):
            raise GraphError(f"encoder: {' and '.join(unknown)}; {_REMEDY}")
        return []
    problems = {form: FORMS[form].supports(traits, spec.precision) for form in FORMS}
    reasons = [f"no {form} form of this model: {' and '.join(problems[form])}" for form in forms if problems[form]]
    possible = [form for form in forms if not problems[form]]
    if not possible:
        able = ",".join(form for form in FORMS if not problems[form])
        remedy = f"export it with --forms {able}" if able else _REMEDY
        raise GraphError(f"decoder: {'; '.join(reasons)}; {remedy}")
    for reason in reasons:
        report(reason)
    return possible
