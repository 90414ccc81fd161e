"""Write every graph of a model into a directory, with one weight file for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
from torch import nn

from tfexport.config import STATIC_OPSET, Form
from tfexport.errors import GraphError
from tfexport.graph.contract import check_graph
from tfexport.graph.select import append_selection
from tfexport.graph.trace import trace_decoder, trace_encoder
from tfexport.graph.weights import write_weights
from tfexport.manifest import GraphEntry
from tfexport.spec import DECODER, ENCODER, WEIGHTS, GraphSpec, ModelSpec, decoder_graph, encoder_graph


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
        forms: of the decoder; not used for an encoder alone.
        opset: of the encoder and the concat form.
        report: told what happens, a line at a time.

    Returns:
        What the manifest says of each graph, by its name in the contract.

    Raises:
        GraphError: the model does not trace, or a graph breaks the contract.
    """
    report("tracing the encoder")
    traced: dict[str, tuple[ir.Model, GraphSpec, int]] = {
        ENCODER: (trace_encoder(model, spec, opset), encoder_graph(spec), opset)
    }
    for form in forms if spec.has_decoder else ():
        report(f"tracing the decoder, {form} form")
        form_opset = STATIC_OPSET if form == "static" else opset
        decoder = trace_decoder(model, spec, form, form_opset)
        append_selection(decoder)
        traced[DECODER[form]] = (decoder, decoder_graph(spec, form), form_opset)
    report("writing graphs and weights")
    write_weights(directory / WEIGHTS, dict(model.named_parameters()), [graph for graph, *_ in traced.values()])
    written = {}
    for name, (graph, contract, graph_opset) in traced.items():
        path = directory / f"{name}.onnx"
        _save(graph, path)
        check_graph(path, contract)
        written[name] = GraphEntry(file=path.name, opset=graph_opset, spec=contract)
    return written


def _save(graph: ir.Model, path: Path) -> None:
    try:
        ir.save(graph, path)
    except (ValueError, TypeError) as error:
        raise GraphError(f"{path.name}: the traced graph cannot be written: {error}") from error
