"""Write the loop graph: the encoder, and around the decoder the whole greedy search.

It is put together from graphs that are written already and points into their weight file: no weight is there twice. The
decoder is the body of an ONNX `Loop` (https://onnx.ai/onnx/operators/onnx__Loop.html); caches and what was generated
go from step to step. The body has no weights of its own: they lie in the graph around it, where encoder and decoder
share what both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from tfexport.bundle.manifest import GraphEntry
from tfexport.contract import (
    DECODER,
    GENERATED_IDS,
    GENERATED_LENGTHS,
    LOG_PROBS,
    LOOP,
    MAX_NEW_TOKENS,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    Form,
    GraphSpec,
    LoopSettings,
    ModelSpec,
    key_value_names,
    loop_form,
    loop_graph,
)
from tfexport.errors import GraphError
from tfexport.export.contract import check_graph, value_info
from tfexport.export.decoders import FORMS
from tfexport.export.external_data import external_weights, span
from tfexport.export.loop.nodes import Constants, Nodes
from tfexport.export.loop.step import DONE, LoopStep, carried


def write_loop(
    directory: Path, graphs: Mapping[str, GraphEntry], spec: ModelSpec, settings: LoopSettings
) -> GraphEntry:
    """Write the loop graph beside the others.

    Args:
        directory: of the graphs and their weight file.
        graphs: that were written, by name in the contract.
        spec: of the model.
        settings: what is generated.

    Returns:
        What the manifest says of the graph.

    Raises:
        GraphError: no form was written that a loop can be made of.
    """
    form = loop_form(graphs)
    if form is None:
        raise GraphError("loop: the graph is made of the concat or the contrib form; choose one of them with --forms")
    encoder, decoder = (
        onnx.load(str(directory / graphs[name].file), load_external_data=False)
        for name in (FORMS[form].encoder, DECODER[form])
    )
    weights = _share_weights({"encoder": encoder.graph, "decoder": decoder.graph})
    contract = loop_graph(spec)
    opsets = {entry.domain: entry.version for model in (encoder, decoder) for entry in model.opset_import}
    model = helper.make_model(
        _compose(encoder.graph, decoder.graph, weights, form, spec, settings, contract),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=max(encoder.ir_version, decoder.ir_version),
        producer_name="tfexport",
    )
    path = directory / f"{LOOP}.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    check_graph(path, contract, portable=False)
    return GraphEntry.of(path.name, graphs[DECODER[form]].opset, contract)


def _share_weights(graphs: Mapping[str, onnx.GraphProto]) -> list[onnx.TensorProto]:
    """Give the names of each graph a namespace, but for those of the source, and take its weights out.

    Returns:
        The weights of all; what lies in one place of the weight file is there once.
    """
    found: dict[object, onnx.TensorProto] = {}
    for namespace, graph in graphs.items():
        names = {name: name for name in (SOURCE_IDS, SOURCE_MASK, "")}
        external = external_weights(graph)
        for weight in graph.initializer:
            name = f"{namespace}/{weight.name}"
            place = (span(weight), weight.data_type, *weight.dims) if weight.name in external else name
            kept = found.setdefault(place, weight)
            names[weight.name] = name if kept is weight else kept.name
            weight.name = names[weight.name]
        for node in graph.node:
            node.name = node.name and f"{namespace}/{node.name}"
            node.input[:] = [names.get(name, f"{namespace}/{name}") for name in node.input]
            node.output[:] = [f"{namespace}/{name}" if name else "" for name in node.output]
    return list(found.values())


def _compose(
    encoder: onnx.GraphProto,
    decoder: onnx.GraphProto,
    weights: Sequence[onnx.TensorProto],
    form: Form,
    spec: ModelSpec,
    settings: LoopSettings,
    contract: GraphSpec,
) -> onnx.GraphProto:
    """Put encoder, what the search begins with, the loop and its results one behind the other."""
    constants, nodes = Constants(LOOP), Nodes(LOOP)
    nodes += encoder.node
    rows = nodes("Shape", SOURCE_IDS, start=0, end=1)
    trips = _trips(nodes, constants, spec, settings)
    begun = _begun(nodes, constants, form, spec, settings, rows, trips)
    step = LoopStep(
        decoder,
        form,
        spec,
        settings,
        constants=constants,
        rows=rows,
        last=nodes("Sub", trips, constants(1)),
        bans=_bans(nodes, constants, spec, settings),
    )
    ended = {name: f"{LOOP}/{name}" for name in begun}
    given = [trips, constants(True, np.bool_), *begun.values()]
    nodes.append(helper.make_node("Loop", given, list(ended.values()), name=LOOP, body=step.graph()))
    nodes("Identity", ended[GENERATED_IDS], called=GENERATED_IDS)
    for name in (GENERATED_LENGTHS, LOG_PROBS):
        nodes("Squeeze", ended[name], constants([1]), called=name)
    inputs, outputs = (list(map(value_info, side)) for side in (contract.inputs, contract.outputs))
    return helper.make_graph(nodes, LOOP, inputs, outputs, [*weights, *constants.tensors.values()])


def _trips(nodes: Nodes, constants: Constants, spec: ModelSpec, settings: LoopSettings) -> str:
    """Return how many tokens are generated at most, int64 []: a number that no caller can raise bounds it."""
    asked = nodes("Squeeze", MAX_NEW_TOKENS, constants([0]))
    is_asked = nodes("Greater", asked, constants(0))
    wanted = nodes("Where", is_asked, asked, constants(settings.max_new_tokens))
    return nodes("Min", wanted, constants(settings.room(spec)))


def _begun(
    nodes: Nodes,
    constants: Constants,
    form: Form,
    spec: ModelSpec,
    settings: LoopSettings,
    rows: str,
    trips: str,
) -> dict[str, str]:
    """Return what the first step is given, by the names of `carried`."""
    column = nodes("Concat", rows, constants([1]), axis=0)
    prompt = nodes("Expand", constants([settings.prompt]), column)
    said = len(settings.prompt) - 1
    length = constants([0])
    if form == "contrib":  # buffers for every token that is read
        length = nodes("Add", nodes("Reshape", trips, constants([1])), constants([said]))
    kinds, caches = carried(spec), {}
    for part, width in (("key", spec.head_dim), ("value", spec.value_dim)):
        shape = nodes("Concat", rows, constants([spec.cache_heads]), length, constants([width]), axis=0)
        kind = kinds[key_value_names("past", spec.layers)[0]]
        caches[part] = nodes("ConstantOfShape", shape, value=helper.make_tensor("zero", kind, [1], [0]))
    begun = {
        TARGET_IDS: prompt,
        DONE: nodes("Expand", constants([[False]], np.bool_), column),
        GENERATED_IDS: nodes("Slice", prompt, constants([1]), constants([1 + said]), constants([1])),
        GENERATED_LENGTHS: nodes("Expand", constants([[said]]), column),
        LOG_PROBS: nodes("Expand", constants([[0]], np.float32), column),
    }
    return begun | {name: caches["key" if "_key." in name else "value"] for name in kinds if name not in begun}


def _bans(nodes: Nodes, constants: Constants, spec: ModelSpec, settings: LoopSettings) -> dict[str, str]:
    """Return what is added to the logits, float32 [vocab]: -inf for tokens that may not be said; see `LoopStep`."""
    banned = {"always": settings.suppressed}
    if settings.min_new_tokens:
        banned["early"] = tuple({*settings.suppressed, *settings.ends})
    if not any(banned.values()):
        return {}
    zeros = nodes("Expand", constants([0], np.float32), constants([spec.vocab]))
    return {
        when: nodes("ScatterElements", zeros, constants(sorted(ids)), constants([-np.inf] * len(ids), np.float32))
        if ids
        else zeros
        for when, ids in banned.items()
    }
