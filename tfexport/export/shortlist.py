"""Restrict a decoder to shortlists, and make their table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tfexport import contract
from tfexport._io.names import GENERATION, TARGET_TOKENIZER
from tfexport.contract import ModelSpec, TensorSpec
from tfexport.errors import ConfigError, GraphError
from tfexport.export._source import Source
from tfexport.generation import GenerationDefaults
from tfexport.importing.shortlist import read_shortlist
from tfexport.runtime.shortlist import Shortlist


def make_shortlist(path: Path, source: Source) -> Shortlist:
    """Read a file of Marian, with Marian's additions and the tokens that end a text.

    If source and target share their vocabulary, each source token may be copied.
    """
    spec, tokenizer = source.spec, source.tokenizer
    if not spec.has_decoder or not spec.source_vocab:
        raise ConfigError("shortlist: this model does not turn tokens into tokens; leave it out")
    found = read_shortlist(path, spec, tokenizer)
    is_shared = spec.source_vocab == spec.vocab and (
        TARGET_TOKENIZER not in source.files if tokenizer else bool(source.config and source.config.tie_embeddings)
    )
    rows = [*found.rows, *[np.empty(0, np.int64)] * (spec.source_vocab - len(found.rows))]
    if is_shared:
        rows = [np.append(row, token) for token, row in enumerate(rows)]
    defaults = GenerationDefaults.from_dict(json.loads(source.files.get(GENERATION, b"{}")), subject=GENERATION)
    ends = {spec.tokens.eos, *defaults.ends(spec.tokens.eos), *defaults.forced_ends}
    always = {*range(min(found.first, spec.vocab)), *ends}
    return Shortlist.of(rows, always, spec.vocab)


def restrict(decoder: ir.Model, spec: ModelSpec) -> ir.Model:
    """Make a decoder compute a shortlist's logits; return the graph of its weights.

    The weights are an input: looking them up in each step would take two to three times as long as the product.
    """
    graph, product = decoder.graph, _projection(decoder.graph)
    lookup = _lookup(product, decoder, spec)
    ids, weights, bias = (_value(tensor) for tensor in contract.shortlist_tensors(spec, "rows"))
    made = ir.Node("", "Gemm", [product.inputs[0], weights, bias], [ir.AttrInt64("transB", 1)], num_outputs=1)
    ir.convenience.replace_nodes_and_values(graph, product, [product], [made], product.outputs, made.outputs)
    graph.inputs.extend((ids, weights, bias))
    logits = graph.outputs[0]
    assert logits.shape is not None
    logits.shape = ir.Shape([logits.shape[0], contract.SHORTLIST_LEN])
    RemoveUnusedNodesPass()(decoder)
    return lookup


def _projection(graph: ir.Graph) -> ir.Node:
    node = graph.outputs[0].producer()
    while node is not None and node.op_type in ("Cast", "Mul"):  # of a scale
        node = next((value.producer() for value in node.inputs if value and value.producer()), None)
    is_product = node is not None and node.op_type == "Gemm" and node.attributes.get_int("transB") == 1
    if node is None or not is_product or not all(value and value.const_value for value in node.inputs[1:]):
        raise GraphError(
            "shortlist: the last operator of the decoder is not a linear map to the vocabulary, perhaps because logits "
            "are capped; export without --shortlist"
        )
    return node


def _lookup(product: ir.Node, decoder: ir.Model, spec: ModelSpec) -> ir.Model:
    ids, *outputs = (_value(tensor) for tensor in contract.shortlist_tensors(spec))
    tables = [
        ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        for value in product.inputs[1:]
        if value
    ]
    tape = ir.tape.Tape()
    for table, output in zip(tables, outputs, strict=False):
        tape.op("Gather", [table, ids], output=output)
    if len(tables) == 1:  # no bias
        zeros = ir.tensor(np.zeros(1, np.float32))
        tape.op("ConstantOfShape", [tape.op("Shape", [ids])], {"value": zeros}, output=outputs[1])
    opsets = {"": decoder.opset_imports[""]}
    made = ir.Graph(
        [ids], outputs, nodes=tape.nodes, initializers=tables, opset_imports=opsets, name=contract.SHORTLIST
    )
    return ir.Model(made, ir_version=decoder.ir_version, producer_name=decoder.producer_name)


def _value(tensor: TensorSpec) -> ir.Value:
    dtype = ir.DataType[{"float32": "FLOAT"}.get(tensor.dtype, tensor.dtype.upper())]
    return ir.val(tensor.name, dtype, ir.Shape(tensor.shape))
