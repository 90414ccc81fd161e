"""Trace a model into graphs: the encoder, the decoder variants and the alignment.

Works for any module with the methods of `tfexport.nn.transformer.Transformer`: `encode` and `decode_step`, or
`hidden_states`. The exporter traces a program again to decompose operators that it does not know, which is slow.
Transformers have only a few of these operators, and `lower` rewrites them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import onnx_ir as ir
import torch
from onnxscript.version_converter import convert_version
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from tfexport import contract
from tfexport.contract import AlignmentHeads, GraphSpec, ModelSpec, TensorSpec, Variant
from tfexport.errors import GraphError, first_line
from tfexport.export.decoders import VARIANTS
from tfexport.export.passes import collapse_reshapes, keep_logits, simplify
from tfexport.nn.cache import Source, StateCache, flattened, paired
from tfexport.nn.eager import align
from tfexport.nn.source import encoder_inputs, position_mask
from tfexport.sources import SOURCE_LEN

_ATEN = torch.ops.aten
# Not needed in a graph.
_ASSERTIONS = {_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default}
_EXPORTER = "torch.onnx._internal.exporter"
# Exists since PyTorch 2.13.
_STACK_TRACES = "do_not_emit_stack_traces"

# Different sizes above 1, so that PyTorch does not treat two dimensions as one.
SAMPLE = {"batch": 2, "rows": 6, "source_len": 5, "target_len": 3, "past_len": 4, "capacity": 7}


class _Function(nn.Module):
    """A function of a model and named inputs, as a module with the parameters."""

    def __init__(self, model: nn.Module, function: Callable[[Any, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        return self.function(self.model, dict(inputs))


def trace_encoder(
    model: nn.Module, spec: ModelSpec, opset: int, source: Callable[[Tensor], Source] = Source
) -> ir.Model:
    """Trace the encoder; `source` creates its self-attention from the mask."""

    def encode(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
        x, mask = encoder_inputs(spec.source, list(inputs.values()))
        if not spec.has_decoder:
            states = model.hidden_states(x, mask)
            if spec.head == "none":
                return [states.float()]
            returned = position_mask(spec.source, mask)
            return [states.float(), model.classify(states, returned).float()]
        return flattened(model.encode(x, source(mask)))

    method = "encode" if spec.has_decoder else "hidden_states"
    return _trace(_Function(model, encode), contract.encoder_graph(spec), opset, method, spec)


def trace_decoder(
    model: nn.Module, spec: ModelSpec, variant: Variant, opset: int, *, speculation: bool = False
) -> ir.Model:
    """Trace one step of the decoder, without the selection of tokens."""
    kind, grows = VARIANTS[variant], spec.cache.grows
    cross_names, past_names, present = spec.cross.names("cross"), *map(spec.cache.names, ("past", "present"))

    def step(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
        target_ids, source_mask = inputs.pop(contract.TARGET_IDS), inputs.pop(contract.SOURCE_MASK)
        cross, past = ([inputs.pop(name) for name in names] for names in (cross_names, past_names))
        make: Any = kind.cache if grows else StateCache
        cache = make(paired(past) if grows else past, target_ids, **inputs)
        logits = model.decode_step(target_ids, kind.cross(paired(cross), source_mask), cache)
        return [logits, *flattened(cache.present)]

    graph = contract.decoder_graph(spec, variant)
    expected = GraphSpec(
        inputs=tuple(tensor for tensor in graph.inputs if tensor.name != contract.NUM_CANDIDATES),
        outputs=tuple(tensor for tensor in graph.outputs if tensor.name in (contract.LOGITS, *present)),
    )
    traced = _trace(_Function(model, step), expected, opset, f"decode_step, {variant} variant", spec)
    for change in kind.passes:
        change(traced)
    if speculation:
        keep_logits(traced)
    return traced


def trace_alignment(model: nn.Module, spec: ModelSpec, heads: AlignmentHeads, opset: int) -> ir.Model:
    """Trace cross-attention weights, in basic operators and only up to their layer."""

    def function(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        *source, target_ids = inputs.values()
        return align(model, heads, spec, source, target_ids)

    return _trace(_Function(model, function), contract.alignment_graph(spec), opset, "alignment", spec)


def _trace(module: nn.Module, expected: GraphSpec, opset: int, subject: str, spec: ModelSpec) -> ir.Model:
    sizes = SAMPLE | spec.source.sizes(SAMPLE[SOURCE_LEN])
    try:
        # Without PyTorch's cache of operator results, capturing a decoder takes two thirds of the time.
        uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
        with _quiet(), torch.no_grad(), uncached:
            program = capture(
                module,
                {tensor.name: _sample(tensor, sizes) for tensor in expected.inputs},
                {tensor.name: _dynamic(tensor) for tensor in expected.inputs},
            )
            model = _translate(program, opset)
    except Exception as error:
        raise GraphError(
            f"the model cannot be traced ({_root_cause(error)})",
            subject=subject,
            remedy="remove branches on tensor values, loops over lengths, .item() and Python state",
        ) from error
    collapse_reshapes(model)
    _name(model, expected)
    return model


class Lowered(ExportedProgram):
    """A program without operators to decompose."""

    def run_decompositions(self, *_: Any, **__: Any) -> ExportedProgram:
        return self


def capture(module: nn.Module, inputs: Mapping[str, Tensor], dynamic_shapes: Mapping[str, Any]) -> ExportedProgram:
    """Trace a module in eval mode that takes one argument, `inputs`."""
    options: Any = {"kwargs": {"inputs": inputs}, "dynamic_shapes": {"inputs": dynamic_shapes}}
    try:
        return torch.export.export(module, (), **options, strict=False)
    except Exception as error:  # noqa: BLE001 - a user's code can fail to trace in any way
        try:
            # Strict mode analyzes the code of the module, so `len` of a tensor is not a constant.
            return torch.export.export(module, (), **options, strict=True)
        except Exception:  # noqa: BLE001 - the first error is more helpful
            raise error from error.__cause__


def lower(program: ExportedProgram) -> ExportedProgram:
    """Rewrite operators in place; return `Lowered` unless one mutates arguments."""
    graph = program.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)
        elif node.target in _REWRITES:
            _REWRITES[node.target](node)
    if any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in graph.nodes):
        return program
    lowered = copy.copy(program)
    lowered.__class__ = Lowered
    return lowered


def _promotes(node: Node) -> bool:
    """Return whether an operator converts an argument, which ONNX never does."""
    result = node.meta.get("val")
    if getattr(node.target, "namespace", "") != "aten":
        return False
    if node.target in (_ATEN._to_copy.default, _ATEN.where.Scalar) or not isinstance(result, Tensor):
        return False
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return bool(types) and result.dtype not in types
    if cast(Any, node.target).overloadpacket in (_ATEN.where, _ATEN.masked_fill):
        types -= {torch.bool}  # of the condition
    # The exporter gives a whole number the type of the tensors; a size is a tensor in the graph.
    types |= {torch.int64 for value in values if isinstance(value, torch.SymInt)}
    types |= {torch.float32 for value in values if isinstance(value, float | torch.SymFloat)}
    if result.dtype != torch.bool:
        types.add(result.dtype)
    return len(types) > 1


def _cast(node: Node) -> None:
    """Remove a cast that does not change the type, except at an output of the graph."""
    source, dtype = node.all_input_nodes[0], node.args[1]
    node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}
    if source.meta["val"].dtype == dtype:
        _bypass(node)


def _bypass(node: Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0], delete_user_cb=lambda user: user.op != "output")
    if not node.users:
        node.graph.erase_node(node)


def _square(node: Node) -> None:
    node.target, node.args = _ATEN.pow.Tensor_Scalar, (node.args[0], 2)


def _subtract(node: Node) -> None:
    # The exporter knows no `rsub`, and cannot convert whole numbers that are subtracted from a fraction.
    source, dtype = node.all_input_nodes[0], node.meta["val"].dtype
    if source.meta["val"].dtype != dtype:
        with node.graph.inserting_before(node):
            converted = node.graph.call_function(_ATEN._to_copy.default, (source,), {"dtype": dtype})
        converted.meta["val"] = source.meta["val"].to(dtype)
        node.replace_input_with(source, converted)
    subtracted, number, *alpha = node.args
    node.target, node.args = _ATEN.sub.Tensor, (number, subtracted)
    if alpha:
        node.kwargs = {"alpha": alpha[0]}


def _transpose(node: Node) -> None:
    source = node.all_input_nodes[0]
    dims = list(range(source.meta["val"].dim()))
    # The exporter translates `mT` to an Einsum that TensorRT does not read.
    order = dims[::-1] if node.target is _ATEN.numpy_T.default else [*dims[:-2], *dims[:-3:-1]]
    node.target, node.args = _ATEN.permute.default, (source, order)


def _unflatten(node: Node) -> None:
    dim, sizes = cast(Any, node.args[1:3])
    first = dim % node.all_input_nodes[0].meta["val"].dim()
    known = node.meta["val"].shape[first : first + len(sizes)]
    # ONNX Runtime 1.25 cannot leave a size open in an empty batch.
    sizes = [new if size == -1 and isinstance(new, int) else size for size, new in zip(sizes, known, strict=True)]
    _reshape(node, dim, dim, sizes)


def _flatten(node: Node) -> None:
    # Only known sizes in the middle; at either end the exporter flattens without sizes.
    shape, dims = node.all_input_nodes[0].meta["val"].shape, cast(Any, node.args[1:])
    start, end = (dim % len(shape) for dim in (*dims, *(0, -1)[len(dims) :]))
    sizes = [size for size in shape[start : end + 1] if isinstance(size, int)]
    if start and end < len(shape) - 1 and len(sizes) == end + 1 - start:
        _reshape(node, start, end, [math.prod(sizes)])


def _reshape(node: Node, start: int, end: int, sizes: Sequence[Any]) -> None:
    source = node.all_input_nodes[0]
    shape = source.meta["val"].shape
    with node.graph.inserting_before(node):
        before = [_size(source, dim) for dim in range(start % len(shape))]
        after = [_size(source, dim) for dim in range(end % len(shape) + 1, len(shape))]
    node.target, node.args = _ATEN.reshape.default, (source, [*before, *sizes, *after])


def _size(source: Node, dim: int) -> Node | int:
    known = source.meta["val"].shape[dim]
    if isinstance(known, int):
        return known
    size = source.graph.call_function(_ATEN.sym_size.int, (source, dim))
    size.meta["val"] = known
    return size


_REWRITES = {
    _ATEN.to.dtype: _cast,
    _ATEN.detach_.default: _bypass,
    _ATEN.numpy_T.default: _transpose,
    _ATEN.mT.default: _transpose,
    _ATEN.square.default: _square,
    _ATEN.rsub.Scalar: _subtract,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.unflatten.int: _unflatten,
}


def _translate(program: ExportedProgram, opset: int) -> ir.Model:
    # If an operator cannot be translated, let the exporter decompose the original program.
    try:
        model = _to_onnx(lower(program), opset)
    except torch.onnx.OnnxExporterError:
        model = _to_onnx(program, opset)
    simplify(model)
    return model


def _to_onnx(program: ExportedProgram, opset: int) -> ir.Model:
    """Translate like `torch.onnx.export`, but skip two slow steps if possible."""
    # Building the operator table takes a second, and the pass that makes types explicit runs every operator again.
    try:
        core, operators = importlib.import_module(_EXPORTER + "._core"), _operators(opset)
        export, translate = core.export, core._exported_program_to_onnx_program
    except (ImportError, AttributeError):  # another version of PyTorch
        return _to_onnx_slowly(program, opset)
    if isinstance(program, Lowered) and not any(map(_promotes, program.graph.nodes)):
        found = translate(program, registry=operators)
        convert_version(found.model, opset, fallback=True)
    elif "opset_version" in inspect.signature(export).parameters:
        found = export(program, registry=operators, opset_version=opset, optimize=False, verbose=False)
    else:  # PyTorch 2.9
        return _to_onnx_slowly(program, opset)
    return cast(ir.Model, found.model)


def _to_onnx_slowly(program: ExportedProgram, opset: int) -> ir.Model:
    found: Any = torch.onnx.export(program, dynamo=True, opset_version=opset, optimize=False, verbose=False)
    return cast(ir.Model, found.model)


@functools.cache
def _operators(opset: int) -> Any:
    return importlib.import_module(_EXPORTER + "._registration").ONNXRegistry.from_torchlib(opset_version=opset)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    place = re.search(r'raised this error:\s+File "(?:[^"]*/)?([^"]+)", line (\d+)', str(error))
    return f"{type(error).__name__}: {first_line(error)}" + (f" ({place[1]} line {place[2]})" if place else "")


def _sample(tensor: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
    return torch.full(shape, tensor.dtype == "bool", dtype=getattr(torch, tensor.dtype))


def _dynamic(tensor: TensorSpec) -> dict[int, Any]:
    return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}


def _name(model: ir.Model, expected: GraphSpec) -> None:
    """Apply the names and dimensions of the contract, and remove machine metadata."""
    for values, specs in ((model.graph.inputs, expected.inputs), (model.graph.outputs, expected.outputs)):
        if len(values) != len(specs):
            raise GraphError(
                f"the traced graph has {len(values)} inputs or outputs, expected {len(specs)}; "
                "give the spec as many layers as the model has"
            )
        for value, tensor in zip(values, specs, strict=True):
            value.name, value.shape = tensor.name, ir.Shape(tensor.shape)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = model.doc_string = None
    model.producer_name, model.producer_version = "tfexport", None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, and switch off settings that are slow or unsupported."""
    logger, attention, config = logging.getLogger("torch"), torch.backends.mha, torch.fx.config
    nowhere = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.callback(attention.set_fastpath_enabled, attention.get_fastpath_enabled())
        attention.set_fastpath_enabled(False)  # ONNX has no operator for a whole layer of torch.nn
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()  # a trace creates many objects and little garbage
        if hasattr(config, _STACK_TRACES):
            stack.callback(setattr, config, _STACK_TRACES, getattr(config, _STACK_TRACES))
            setattr(config, _STACK_TRACES, True)  # recording one for each operator is slow
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
