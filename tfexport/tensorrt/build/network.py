"""From the bytes of a graph to a network that TensorRT computes as the graph says, or an error that names the node."""

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
from tfexport.tensorrt.library import Library
from tfexport.tensorrt.log import Log, without_noise


@dataclass(frozen=True)
class Tensor:
    """One input or output of a network.

    Attributes:
        name: as in the graph.
        dtype: as the graph contract spells it.
        shape: -1 where the size is free.
        is_shape_input: its values, not only its sizes, decide shapes; it lives in host memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_shape_input: bool


@dataclass(frozen=True)
class Graph:
    """A graph to build.

    Attributes:
        name: of the plan that it becomes.
        data: a serialised ONNX model; of the static form with a number for its capacity.
        path: where it lies or would lie; its external data is found beside it.
    """

    name: str
    data: bytes
    path: Path


@dataclass(frozen=True)
class Network:
    """A parsed graph, with everything alive that it refers to.

    Attributes:
        name: of the plan that it becomes.
        library: that parsed it.
        log: what the library said since then; has the reason when something fails.
        definition: the `INetworkDefinition`.
        builder: that made it.
        parser: that filled it and owns its weights.
        inputs: in order.
        outputs: in order.
        layers: how many layers there are of each type, by the name of the type.
    """

    name: str
    library: Library
    log: Log
    definition: Any
    builder: Any
    parser: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: Mapping[str, int]

    @property
    def subject(self) -> str:
        """What an error begins with."""
        return f"{self.library.target} {self.library.version}: {self.name}"


def parse_graph(library: Library, graph: Graph) -> Network:
    """Parse a graph and make sure that it is computed as it says.

    Attention is marked as decomposable: there are no fused kernels for float32, nor for every width of a head.

    Args:
        library: to parse with.
        graph: to parse.

    Raises:
        BackendError: this library parses on a GPU only, and there is none.
        EngineError: lists every node that cannot be parsed, with the reason, and all attention that would be
            computed wrongly, and all caches that are read otherwise than through their update.
    """
    subject = f"{library.target} {library.version}: {graph.path.name}"
    if not graph.data:
        raise EngineError(f"{subject}: the graph is empty; export the bundle again")
    log = library.listen()
    builder = library.builder(log)
    definition = _made(builder.create_network(library.strongly_typed()), subject, "network", log)
    parser = _made(library.trt.OnnxParser(definition, library.logger), subject, "parser", log)
    is_parsed = parser.parse(graph.data, str(graph.path))
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if errors or not is_parsed:
        problems = [_describe(error) for error in errors] or [log.reason()]
        if any("Attention" in error.node_operator() for error in errors):
            problems += _graph_problems(graph.data)  # they have the remedy, which the parser has not
        raise_all(EngineError, f"{subject}: the graph cannot be parsed", problems)
    if definition.num_outputs == 0:
        raise EngineError(f"{subject}: the graph has no outputs; export the bundle again")
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    attention = list(_attention(library, layers))
    problems = _graph_problems(graph.data) if attention else []
    found = [(layer.name, problem) for layer in attention if (problem := _causal_problem(layer))]
    problems += [problem for name, problem in found if not any(repr(name) in known for known in problems)]
    raise_all(EngineError, subject, problems + _cache_problems(library, layers))
    for layer in attention:
        # Where there is a fused kernel it is taken all the same; without one, and in float32 there is none, the
        # build would fail. `SerializedEngine.kernels` tells which it was.
        layer.decomposable = True
    return Network(
        name=graph.name,
        library=library,
        log=log,
        definition=definition,
        builder=builder,
        parser=parser,
        inputs=tuple(_tensor(library, definition.get_input(i)) for i in range(definition.num_inputs)),
        outputs=tuple(_tensor(library, definition.get_output(i)) for i in range(definition.num_outputs)),
        layers=dict(sorted(Counter(layer.type.name for layer in layers).items())),
    )


def check_contract(network: Network, contract: GraphSpec) -> None:
    """Make sure that a network takes and gives what the contract says.

    Raises:
        EngineError: lists every name that is missing, too much or of another type.
    """
    problems = []
    for found, expected in ((network.inputs, contract.inputs), (network.outputs, contract.outputs)):
        got = {tensor.name: tensor.dtype for tensor in found}
        wanted: dict[str, str] = {tensor.name: tensor.dtype for tensor in expected}
        problems += [
            f"{name} is {got.get(name, 'missing')}, expected {wanted.get(name, 'nothing of this name')}"
            for name in sorted(got.keys() | wanted.keys())
            if got.get(name) != wanted.get(name)
        ]
    raise_all(EngineError, network.subject, problems)


def _made(thing: Any, subject: str, kind: str, log: Log) -> Any:
    if thing is None:
        raise EngineError(f"{subject}: no {kind} can be made: {log.reason()}")
    return thing


def _describe(error: Any) -> str:
    """Spell a `ParserError`: node, operator and reason."""
    node = " ".join(part for part in (error.node_operator(), repr(error.node_name())) if part.strip("'"))
    reason = f"{error.code().name} {without_noise(error.desc())}"
    return f"{node}: {reason}" if node else reason


def _tensor(library: Library, tensor: Any) -> Tensor:
    return Tensor(tensor.name, library.dtype_name(tensor.dtype), tuple(tensor.shape), bool(tensor.is_shape_tensor))


def _attention(library: Library, layers: list[Any]) -> Iterator[Any]:
    """Find each `IAttention`; versions that have none of them refuse the operator in their parser."""
    kind = getattr(library.trt.LayerType, "ATTENTION_INPUT", None)
    for layer in layers:
        if kind is not None and layer.type == kind:
            # The network hands out plain layers; this is how the bindings turn one into what it is.
            layer.__class__ = library.trt.IAttentionInputLayer
            yield layer.attention


def _graph_problems(graph: bytes) -> list[str]:
    """Say which attention the parser reads otherwise than it is meant; what it drops, the network does not show."""
    if importlib.util.find_spec("onnx") is None:
        return [f"the graph has attention, which cannot be checked without onnx; {install_command('onnx')}"]
    from tfexport.export.attention_check import attention_problems

    return attention_problems(graph)


def _causal_problem(attention: Any) -> str | None:
    """Refuse a causal mask of the library's own, which counts from the first key whatever a cache holds."""
    if hasattr(attention, "causal_kind"):
        kind = attention.causal_kind.name
    else:  # TensorRT 10 knows one kind only
        kind = "UPPER_LEFT" if attention.causal else "NONE"
    if kind == "NONE":
        return None
    queries, keys = (attention.get_input(i).shape[2] for i in (0, 1))
    if kind == "UPPER_LEFT" and queries == keys > 0:
        return None
    return (
        f"Attention {attention.name!r} is causal ({kind}) over {_length(queries)} queries and {_length(keys)} keys, "
        "which TensorRT aligns otherwise than ONNX does; give it a mask [batch, 1, target_len, len] instead"
    )


def _cache_problems(library: Library, layers: list[Any]) -> list[str]:
    """Refuse whoever reads a cache as it was: the update writes into the same memory, before or after."""
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


def _length(size: int) -> str:
    return "any number of" if size < 0 else str(size)
