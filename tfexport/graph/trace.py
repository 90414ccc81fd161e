"""Trace a model into graphs with `torch.export`: encoder and decoder, the decoder in each of its forms.

Any module will do that offers `encode` and `decode_step` as
`tfexport.models.transformer.Transformer` does (`hidden_states` for an encoder
alone); the exporter takes the protocol, not the class.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.errors import GraphError
from tfexport.graph.forms.contrib import ContribCache
from tfexport.models import attention
from tfexport.models.attention import MASK_FILL
from tfexport.models.cache import Cache, ConcatCache, KeyValue
from tfexport.spec import (
    CACHE_LENGTHS,
    LAST_POSITION,
    POSITIONS,
    STATIC_OPSET,
    TOTAL_LENGTH,
    Form,
    GraphSpec,
    ModelSpec,
    TensorSpec,
    decoder_graph,
    encoder_graph,
)

# Sizes to trace with: all different and none of them 1, so that no two dimensions are taken for the same.
SAMPLE = {"batch": 2, "rows": 6, "source_len": 5, "target_len": 3, "past_len": 4, "capacity": 7}


class EncoderDecoder(Protocol):
    """What can be exported: an encoder and a decoder with an explicit cache."""

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> list[KeyValue]:
        """Return each decoder layer's cross-attention keys and values, [batch, heads, source_len, …]."""
        ...

    def decode_step(self, target_ids: Tensor, source_mask: Tensor, cross: Sequence[KeyValue], cache: Cache) -> Tensor:
        """Return the last position's logits, float32 [rows, vocab]; hand new keys and values to `cache`."""
        ...


class StaticCache:
    """Buffers of fixed capacity, written in place at each row's own position.

    `TensorScatter` (ONNX opset 24) has no PyTorch twin: this cache exists only in a trace.
    """

    def __init__(self, past: Sequence[KeyValue], cache_lengths: Tensor) -> None:
        """Start from buffers [rows, heads, capacity, …] filled up to `cache_lengths` int64 [rows]."""
        self.past, self.cache_lengths = past, cache_lengths
        self.present: list[KeyValue] = []

    def positions(self, target_ids: Tensor) -> Tensor:
        """Return int64 [rows, target_len]."""
        return self.cache_lengths[:, None] + torch.arange(target_ids.shape[1])

    def mask(self, target_ids: Tensor) -> Tensor:
        """Return the causal mask over the whole buffer, bool [rows, 1, target_len, capacity]."""
        return torch.arange(self.past[0].key.shape[2]) <= self.positions(target_ids)[:, None, :, None]

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write a layer's new keys and values into its buffers."""
        past = self.past[layer]
        self.present.append(KeyValue(self._scatter(past.key, new.key), self._scatter(past.value, new.value)))
        return self.present[-1]

    def _scatter(self, buffer: Tensor, new: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (buffer, new, self.cache_lengths),
            {"axis": 2, "mode": "linear"},
            dtype=buffer.dtype,
            shape=buffer.shape,
            version=STATIC_OPSET,
        )


def sdpa_attend(
    query: Tensor, memory: KeyValue, mask: Tensor, bias: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Do what `models.attention.attend` does in one operator, which becomes ONNX `Attention`.

    The mask is expanded to every query: some runtimes refuse or misread a broadcast one. It is added to the scores:
    from one of bool TensorRT-RTX first works out which keys are left, and fails where 8 does not divide head_dim.
    """
    mask = torch.where(mask, 0.0 if bias is None else bias, MASK_FILL).to(query.dtype)
    mask = mask.expand(query.shape[0], -1, query.shape[2], memory.key.shape[2])
    return F.scaled_dot_product_attention(query, memory.key, memory.value, attn_mask=mask, scale=scale)


class _Encoder(nn.Module):
    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.model, self.has_decoder = model, spec.has_decoder

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> list[Tensor]:
        if not self.has_decoder:
            return [cast(Any, self.model).hidden_states(source_ids, source_mask).float()]
        return _flatten(cast(EncoderDecoder, self.model).encode(source_ids, source_mask))


class _Decoder(nn.Module):
    """The step with its caches as plain inputs and outputs, in the order of the contract."""

    def __init__(self, model: nn.Module, form: Form) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(
        self, target_ids: Tensor, source_mask: Tensor, cross: list[Tensor], past: list[Tensor], *lengths: Tensor
    ) -> list[Tensor]:
        cache = _CACHES[self.form](_pair(past), *lengths)
        model = cast(EncoderDecoder, self.model)
        logits = model.decode_step(target_ids, source_mask, _pair(cross), cache)
        return [logits, *_flatten(cache.present)]


_CACHES: dict[Form, Any] = {"concat": ConcatCache, "static": StaticCache, "contrib": ContribCache}
# What tells a cache of fixed size how full it is.
_LENGTHS: dict[Form, list[str]] = {
    "concat": [],
    "static": [CACHE_LENGTHS],
    "contrib": [POSITIONS, LAST_POSITION, TOTAL_LENGTH],
}


def _flatten(pairs: Sequence[KeyValue]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in (pair.key, pair.value)]


def _pair(tensors: Sequence[Tensor]) -> list[KeyValue]:
    return [KeyValue(key, value) for key, value in zip(tensors[::2], tensors[1::2], strict=True)]


def trace_encoder(model: nn.Module, spec: ModelSpec, opset: int) -> ir.Model:
    """Trace the encoder.

    Args:
        model: in eval mode, of the precision that `spec` names.
        spec: of the model.
        opset: of the ONNX standard.

    Raises:
        GraphError: the model does not trace, or not for every size.
    """
    contract = encoder_graph(spec)
    names = [tensor.name for tensor in contract.inputs]
    return _trace(_Encoder(model, spec), contract, names, opset, "encoder")


def trace_decoder(model: nn.Module, spec: ModelSpec, form: Form, opset: int) -> ir.Model:
    """Trace one step of the decoder, without the selection of tokens.

    Args:
        model: in eval mode, of the precision that `spec` names.
        spec: of the model.
        form: how the cache is kept.
        opset: of the ONNX standard; the static form needs 24.

    Raises:
        GraphError: the model does not trace, or not for every size.
    """
    contract = decoder_graph(spec, form)
    inputs = [tensor for tensor in contract.inputs if tensor.name != "num_candidates"]
    outputs = [tensor for tensor in contract.outputs if tensor.name == "logits" or tensor.name.startswith("present_")]
    traced = GraphSpec(tuple(inputs), tuple(outputs))
    groups: list[str | list[str]] = ["target_ids", "source_mask"]
    groups += [[t.name for t in inputs if t.name.startswith(prefix)] for prefix in ("cross_", "past_")]
    groups += _LENGTHS[form]
    decoder, subject = _Decoder(model, form), f"decoder, {form} form"
    if form == "static":
        with mock.patch.object(attention, "attend", sdpa_attend):
            return _trace(decoder, traced, groups, opset, subject)
    return _trace(decoder, traced, groups, opset, subject)


def _trace(
    module: nn.Module, contract: GraphSpec, groups: Sequence[str | list[str]], opset: int, subject: str
) -> ir.Model:
    specs = {tensor.name: tensor for tensor in contract.inputs}

    def each(make: Any) -> tuple[Any, ...]:
        return tuple(
            [make(specs[name]) for name in group] if isinstance(group, list) else make(specs[group]) for group in groups
        )

    arguments, dynamic = each(_sample), each(_dynamic)
    if isinstance(module, _Decoder) and len(groups) > 4:  # *lengths is one entry of the signature
        dynamic = (*dynamic[:4], dynamic[4:])
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                arguments,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=dynamic,
                optimize=True,
                verbose=False,
            )
    except Exception as error:
        raise GraphError(
            f"{subject}: the model does not trace ({_root_cause(error)}); "
            "remove branches on tensor values and Python state from encode and decode_step"
        ) from error
    assert program is not None
    model = program.model
    _name(model, [specs[name] for group in groups for name in ([group] if isinstance(group, str) else group)], contract)
    return model


def _root_cause(error: BaseException) -> str:
    """Spell what lies under the exporter's own wrapping: type and first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"{type(error).__name__}: {reason}"


def _sample(tensor: TensorSpec) -> Tensor:
    shape = [SAMPLE[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
    match tensor.dtype:
        case "bool":
            return torch.ones(shape, dtype=torch.bool)
        case _:
            return torch.zeros(shape, dtype=getattr(torch, tensor.dtype))


def _dynamic(tensor: TensorSpec) -> dict[int, Any]:
    return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}


def _name(model: ir.Model, inputs: Sequence[TensorSpec], contract: GraphSpec) -> None:
    """Give inputs and outputs the names and dimensions of the contract, and drop what tells of this machine."""
    for values, specs in ((model.graph.inputs, inputs), (model.graph.outputs, contract.outputs)):
        if len(values) != len(specs):
            raise GraphError(
                f"the traced graph has {len(values)} inputs or outputs, expected {len(specs)}; "
                "make the number of layers in the specification and in the model agree"
            )
        for value, tensor in zip(values, specs, strict=True):
            value.name = tensor.name
            value.shape = ir.Shape(tensor.shape)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = model.doc_string = None
    model.producer_name, model.producer_version = "tfexport", None
    kept = {id(value) for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())}
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in kept:
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's own reports from the user's terminal; what fails is raised."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
