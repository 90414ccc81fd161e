"""Parse a graph into a network, and check that TensorRT will compute it correctly."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport._io.extras import install_command
from tfexport.contract import GraphSpec
from tfexport.errors import EngineError, raise_all
from tfexport.tensorrt._library import Library, Log, without_noise


@dataclass(frozen=True)
class Graph:
    """A graph to build: plan name, serialized ONNX model, and path for external data."""

    name: str
    data: bytes
    path: Path


@dataclass(frozen=True)
class Network:
    """A parsed graph, and the objects that must live as long as it."""

    name: str
    library: Library
    log: Log  # since parsing began
    definition: Any  # INetworkDefinition
    builder: Any
    parser: Any  # owns the weights
    inputs: list[Any]  # ITensor
    outputs: list[Any]
    layers: Mapping[str, int]  # number of layers by type

    @property
    def subject(self) -> str:
        """Subject of errors."""
        return f"{self.library}: {self.name}"


def parse_graph(library: Library, graph: Graph) -> Network:
    """Parse a graph; an `EngineError` lists every node that fails or would be wrong."""
    subject = f"{library}: {graph.path.name}"
    if not graph.data:
        raise EngineError(f"{subject}: the graph is empty; export the bundle again")
    log = library.listen()
    builder = library.builder(log)
    definition = builder.create_network(library.strongly_typed())
    parser = None if definition is None else library.trt.OnnxParser(definition, library.logger)
    if parser is None:
        raise EngineError(f"{subject}: cannot create a network or a parser: {log.reason()}")
    is_parsed = parser.parse(graph.data, str(graph.path))
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if errors or not is_parsed:
        problems = [_describe(error) for error in errors] or [log.reason()]
        if any("Attention" in error.node_operator() for error in errors):
            problems += _attention_problems(graph.data)  # these contain the remedy
        raise_all(EngineError, f"{subject}: the graph cannot be parsed", problems)
    if definition.num_outputs == 0:
        raise EngineError(f"{subject}: the graph has no outputs; export the bundle again")
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    attention = list(_attention(library, layers))
    problems = _attention_problems(graph.data) if attention else []
    found = [(layer.name, problem) for layer in attention if (problem := _causal_problem(layer))]
    problems += [problem for name, problem in found if not any(repr(name) in known for known in problems)]
    raise_all(EngineError, subject, problems + _cache_problems(library, layers))
    for layer in attention:
        # Without this, the build fails if there is no fused kernel, as for float32 and some head sizes.
        layer.decomposable = True
    return Network(
        name=graph.name,
        library=library,
        log=log,
        definition=definition,
        builder=builder,
        parser=parser,
        inputs=[definition.get_input(i) for i in range(definition.num_inputs)],
        outputs=[definition.get_output(i) for i in range(definition.num_outputs)],
        layers=dict(sorted(Counter(layer.type.name for layer in layers).items())),
    )


def check_contract(network: Network, contract: GraphSpec) -> None:
    """Raise `EngineError` if a name or type differs from the contract."""
    problems = []
    for found, expected in ((network.inputs, contract.inputs), (network.outputs, contract.outputs)):
        got = {tensor.name: network.library.dtype_name(tensor.dtype) for tensor in found}
        wanted: dict[str, str] = {tensor.name: tensor.dtype for tensor in expected}
        problems += [
            f"{name} is {got.get(name, 'missing')}, expected {wanted.get(name, 'nothing of this name')}"
            for name in sorted(got.keys() | wanted.keys())
            if got.get(name) != wanted.get(name)
        ]
    raise_all(EngineError, network.subject, problems)


def _describe(error: Any) -> str:
    node = " ".join(part for part in (error.node_operator(), repr(error.node_name())) if part.strip("'"))
    reason = f"{error.code().name} {without_noise(error.desc())}"
    return f"{node}: {reason}" if node else reason


def _attention(library: Library, layers: list[Any]) -> Iterator[Any]:
    # Versions without `IAttention` refuse the operator in their parser.
    kind = getattr(library.trt.LayerType, "ATTENTION_INPUT", None)
    for layer in layers:
        if kind is not None and layer.type == kind:
            # The network returns base-class layers; the bindings downcast them in this way.
            layer.__class__ = library.trt.IAttentionInputLayer
            yield layer.attention


def _attention_problems(graph: bytes) -> list[str]:
    # The network does not show attributes that the parser drops, so check the graph.
    if importlib.util.find_spec("onnx") is None:
        return [f"the graph has attention, which cannot be checked without onnx; {install_command('onnx')}"]
    from tfexport.export.attention_check import attention_problems

    return attention_problems(graph)


def _causal_problem(attention: Any) -> str | None:
    # The library's own causal mask counts from the first key, even if there is a cache.
    if hasattr(attention, "causal_kind"):
        kind = attention.causal_kind.name
    else:  # TensorRT 10 knows one kind only
        kind = "UPPER_LEFT" if attention.causal else "NONE"
    queries, keys = (attention.get_input(i).shape[2] for i in (0, 1))
    if kind == "NONE" or (kind == "UPPER_LEFT" and queries == keys > 0):
        return None
    numbers = ["any number of" if size < 0 else size for size in (queries, keys)]
    return (
        f"Attention {attention.name!r} is causal ({kind}) over {numbers[0]} queries and {numbers[1]} keys, "
        "which TensorRT aligns differently from ONNX; give it a mask [batch, 1, target_len, len] instead"
    )


def _cache_problems(library: Library, layers: list[Any]) -> list[str]:
    # A cache update writes in place, so other layers may see the cache before or after it.
    kind = getattr(library.trt.LayerType, "KV_CACHE_UPDATE", None)
    caches = {layer.get_input(0).name: layer.name for layer in layers if kind is not None and layer.type == kind}
    problems = []
    for layer in layers if caches else ():
        if layer.type not in (kind, library.trt.LayerType.SHAPE):
            read = {tensor.name for i in range(layer.num_inputs) if (tensor := layer.get_input(i)) is not None}
            problems += [
                f"{layer.name!r} reads {name}, which TensorScatter {caches[name]!r} overwrites; let it read the result"
                for name in sorted(read & caches.keys())
            ]
    return problems
