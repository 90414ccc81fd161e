"""Write every graph of a model into a directory, with one weight file for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import onnx_ir as ir
from torch import nn

from tfexport.bundle.manifest import GraphEntry
from tfexport.errors import GraphError
from tfexport.graph.contract import check_graph
from tfexport.graph.forms.contrib import contrib_problems, joint_weights, to_contrib
from tfexport.graph.passes.topk import append_selection
from tfexport.graph.reorder import reorder_graph
from tfexport.graph.trace import trace_decoder, trace_encoder
from tfexport.graph.weights import write_weights
from tfexport.models.transformer import Transformer
from tfexport.spec import (
    CONCAT_OPSETS,
    DECODER,
    ENCODER,
    ENCODER_CONTRIB,
    REORDER,
    STATIC_OPSET,
    WEIGHTS,
    Form,
    GraphSpec,
    ModelSpec,
    decoder_graph,
    encoder_graph,
    reorder_spec,
)


def write_graphs(
    model: nn.Module,
    spec: ModelSpec,
    directory: Path,
    *,
    forms: Sequence[Form],
    opset: int,
    report: Callable[[str], None],
) -> dict[str, GraphEntry]:
    """Trace, append selection, share weights, write and check.

    Args:
        model: in eval mode, its parameters of the precision that `spec` names.
        spec: of the model.
        directory: existing; receives `NAME.onnx` for each graph and the weight file.
        forms: of the decoder; not used for an encoder alone, and contrib not where the operators cannot do the model.
        opset: of the encoder and the concat form.
        report: told what happens, a line at a time.

    Returns:
        What the manifest says of each graph, by its name in the contract.

    Raises:
        GraphError: the model does not trace, has no form that was asked for, or a graph breaks the contract.
    """
    possible = _possible(forms, model, report) if spec.has_decoder else []
    report("tracing the encoder")
    traced: dict[str, tuple[ir.Model, GraphSpec, int]] = {
        ENCODER: (trace_encoder(model, spec, opset), encoder_graph(spec), opset)
    }
    for form in possible:
        report(f"tracing the decoder, {form} form")
        form_opset = STATIC_OPSET if form == "static" else opset
        subject = to_contrib(cast(Transformer, model)) if form == "contrib" else model
        if form == "contrib":
            traced[ENCODER_CONTRIB] = (trace_encoder(subject, spec, opset), encoder_graph(spec), opset)
        decoder = trace_decoder(subject, spec, form, form_opset)
        append_selection(decoder)
        traced[DECODER[form]] = (decoder, decoder_graph(spec, form), form_opset)
    report("writing graphs and weights")
    graphs = [graph for graph, *_ in traced.values()]
    write_weights(directory / WEIGHTS, dict(model.named_parameters()), graphs, joint=list(joint_weights(model)))
    written = {}
    for name, (graph, contract, graph_opset) in traced.items():
        path = directory / f"{name}.onnx"
        _save(graph, path)
        check_graph(path, contract, portable=name not in (ENCODER_CONTRIB, DECODER["contrib"]))
        written[name] = GraphEntry(file=path.name, opset=graph_opset, spec=contract)
    if set(possible) - {"contrib"}:  # what a GPU may run
        written[REORDER] = _write_reorder(spec, directory)
    return written


def _write_reorder(spec: ModelSpec, directory: Path) -> GraphEntry:
    path, contract = directory / f"{REORDER}.onnx", reorder_spec(spec.precision)
    path.write_bytes(reorder_graph(spec.precision))
    check_graph(path, contract)
    return GraphEntry(file=path.name, opset=CONCAT_OPSETS[0], spec=contract)


def _possible(forms: Sequence[Form], model: nn.Module, report: Callable[[str], None]) -> list[Form]:
    """Leave the contrib form out, with the reason, where ONNX Runtime's operators cannot do the model."""
    problems = contrib_problems(model) if "contrib" in forms else []
    if problems:
        reason = f"no contrib form of this model: {' and '.join(problems)}"
        if list(forms) == ["contrib"]:
            raise GraphError(f"decoder: {reason}; export it with --forms concat,static")
        report(reason)
    return [form for form in forms if form != "contrib" or not problems]


def _save(graph: ir.Model, path: Path) -> None:
    try:
        ir.save(graph, path)
    except (ValueError, TypeError) as error:
        raise GraphError(f"{path.name}: the traced graph cannot be written: {error}") from error
