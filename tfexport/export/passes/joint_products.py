"""Products of one input whose results lie side by side are one product over joined weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def join_products(model: ir.Model) -> None:
    """Replace products that are split into heads and put side by side by one, and name its weights after theirs.

    Args:
        model: changed in place: Gemm(x, Wᵢ, bᵢ), each viewed as [tokens, heads, width], concatenated along the heads
            and viewed otherwise, becomes Gemm(x, W, b) with the weights and biases one below the other. What is
            nothing but a view of a product is left alone.
    """
    graph = model.graph
    for concat in [node for node in graph if node.op_type == "Concat"]:
        products = [_product(value) for value in concat.inputs]
        if all(products) and _joins(concat, [node for node in products if node]):
            _join(graph, concat, [node for node in products if node])
    RemoveUnusedNodesPass()(model)


def _product(value: ir.Value | None) -> ir.Node | None:
    """Return the Gemm that `value` is a view of."""
    view = value.producer() if value else None
    source = view.inputs[0] if view and view.op_type == "Reshape" else None
    product = source.producer() if source else None
    return product if product and product.op_type == "Gemm" else None


def _joins(concat: ir.Node, products: Sequence[ir.Node]) -> bool:
    """Say whether nothing but a view of the whole reads the products, and they differ in their weights alone."""
    first = products[0]
    return (
        concat.attributes.get_int("axis") == 1
        and all(use.node.op_type == "Reshape" for use in concat.outputs[0].uses())
        and all(node.inputs[0] is first.inputs[0] and node.attributes == first.attributes for node in products)
        and len({len(node.inputs) for node in products}) == 1
        and all(value and value.const_value for node in products for value in node.inputs[1:])
    )


def _join(graph: ir.Graph, concat: ir.Node, products: Sequence[ir.Node]) -> None:
    operands = list(zip(*(node.inputs[1:] for node in products), strict=True))
    # Biases that are equal in several layers have been made one, with the name of the first: weights have their own.
    parent = (operands[0][0].name or "").rsplit(".", 2)[0]
    weights = [_side_by_side(graph, values, parent) for values in operands]
    first = products[0]
    joint = ir.Node("", "Gemm", [first.inputs[0], *weights], list(first.attributes.values()), num_outputs=1)
    joint.outputs[0].type = first.outputs[0].type
    graph.insert_before(concat, joint)
    concat.outputs[0].replace_all_uses_with(joint.outputs[0])


def _side_by_side(graph: ir.Graph, values: Sequence[ir.Value], parent: str) -> ir.Value:
    """Join weights [out, in] or biases [out]: a.q.weight, a.k.weight and a.v.weight become a.weight, `parent` is a."""
    name = f"{parent}.{(values[0].name or '').rpartition('.')[2]}"
    array = np.concatenate([value.const_value.numpy() for value in values if value.const_value])
    joint = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(joint)
    return joint
