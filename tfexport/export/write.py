"""Write every graph of a model into a directory, with one weight file for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
from torch import nn

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
from tfexport.errors import GraphError
from tfexport.export.contract import check_graph
from tfexport.export.decoders import FORMS
from tfexport.export.decoders.contrib import joint_weights
from tfexport.export.decoders.form import Seam
from tfexport.export.passes.lookups import separate_lookups
from tfexport.export.passes.topk import append_selection
from tfexport.export.reorder import reorder_graph
from tfexport.export.seam import traits_of
from tfexport.export.trace import trace_alignment, trace_decoder, trace_encoder
from tfexport.export.weights import write_weights
from tfexport.nn.config import TransformerConfig

_TEACH = "list what is new in tfexport/export/decoders"


def write_graphs(
    model: nn.Module,
    spec: ModelSpec,
    directory: Path,
    *,
    forms: Sequence[Form],
    opset: int,
    alignment: AlignmentHeads | None = None,
    speculation: bool = False,
    report: Callable[[str], None],
) -> dict[str, GraphEntry]:
    """Trace, append selection, share weights, write and check.

    Args:
        model: in eval mode, its parameters of the precision that `spec` names.
        spec: of the model.
        directory: existing; receives `NAME.onnx` for each graph and the weight file.
        forms: of the decoder; not used for an encoder alone, and contrib not where the operators cannot do the model.
        opset: of the encoder and the concat form.
        alignment: layer and heads, as `AlignmentHeads.within` returns them; None for no such graph.
        speculation: let the decoder of the contrib form give the logits of several positions.
        report: told what happens, a line at a time.

    Returns:
        What the manifest says of each graph, by its name in the contract.

    Raises:
        GraphError: the model does not trace, has no form that was asked for, or a graph breaks the contract.
    """
    possible = _possible(forms, traits_of(model, spec), spec, report)
    if speculation and "contrib" not in possible:
        raise GraphError("speculation: it is made of the contrib form, which this export has not; leave it out")
    report("tracing the encoder")
    traced: dict[str, tuple[ir.Model, GraphSpec, int]] = {
        ENCODER: (trace_encoder(model, spec, opset), encoder_graph(spec), opset)
    }
    portable = {ENCODER}
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
        portable.add(ALIGNMENT)
    report("writing graphs and weights")
    graphs = [graph for graph, *_ in traced.values()]
    write_weights(directory / WEIGHTS, dict(model.named_parameters()), graphs, joint=list(joint_weights(model)))
    if "contrib" in possible:
        separate_lookups(traced[DECODER["contrib"]][0])
    written = {}
    for name, (graph, contract, graph_opset) in traced.items():
        path = directory / f"{name}.onnx"
        _save(graph, path)
        check_graph(path, contract, portable=name in portable)
        written[name] = GraphEntry.of(path.name, graph_opset, contract)
    if set(possible) - {"contrib"}:  # what a GPU may run
        written[REORDER] = _write_reorder(spec, directory)
    return written


def _write_reorder(spec: ModelSpec, directory: Path) -> GraphEntry:
    path, contract = directory / f"{REORDER}.onnx", reorder_spec(spec.precision)
    path.write_bytes(reorder_graph(spec.precision))
    check_graph(path, contract)
    return GraphEntry.of(path.name, CONCAT_OPSETS[0], contract)


def _possible(
    forms: Sequence[Form], traits: TransformerConfig | Seam, spec: ModelSpec, report: Callable[[str], None]
) -> list[Form]:
    """Leave out a form that cannot do the model, with the reason; refuse where none is left.

    An encoder alone has no form, but its graph is of the same trace as that of the concat form.
    """
    if not spec.has_decoder:
        if unknown := FORMS["concat"].supports(traits, spec.precision):
            raise GraphError(f"encoder: {' and '.join(unknown)}; {_TEACH}")
        return []
    problems = {form: FORMS[form].supports(traits, spec.precision) for form in FORMS}
    reasons = [f"no {form} form of this model: {' and '.join(problems[form])}" for form in forms if problems[form]]
    possible = [form for form in forms if not problems[form]]
    if not possible:
        able = ",".join(form for form in FORMS if not problems[form])
        remedy = f"export it with --forms {able}" if able else _TEACH
        raise GraphError(f"decoder: {'; '.join(reasons)}; {remedy}")
    for reason in reasons:
        report(reason)
    return possible


def _save(graph: ir.Model, path: Path) -> None:
    try:
        ir.save(graph, path)
    except (ValueError, TypeError) as error:
        raise GraphError(f"{path.name}: the traced graph cannot be written: {error}") from error
