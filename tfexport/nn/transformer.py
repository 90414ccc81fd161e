"""The canonical encoder-decoder transformer, the reference for every stage.

State dict names are the canonical ones: `{enc,dec}.embed.weight`, `.pos`, `.emb_norm`, `.rel_bias.weight`, `.norm`,
`.layers.{i}.{self,cross}.{q,k,v,o,q_norm,k_norm}`, `.layers.{i}.self.{forget,update,input,ffn}`,
`.layers.{i}.{norm,post_norm}1..3`, `.layers.{i}.rel_bias.weight`, `.layers.{i}.ffn.{fc1,fc2,gate}`; `out`, `head`.
Instead of `enc.embed`, a model of features has `enc.front.layers.{i}.{conv,norm}` and `enc.front.proj`, one of images
`enc.front.conv` and `enc.front.tokens` [class_tokens, d_model]. Internally, all tokens share one axis,
[rows · len, d_model].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tfexport.contract import Pooling
from tfexport.errors import ConfigError, raise_all
from tfexport.nn.attention import MultiHeadAttention
from tfexport.nn.cache import Cache, ConcatCache, Cross, KeyValue, Source, StateCache, empty_cache
from tfexport.nn.config import Side, TransformerConfig, model_spec
from tfexport.nn.front import front_end
from tfexport.nn.layers import FeedForward, LayerNorm
from tfexport.nn.positions import Alibi, RelativeBias, Rotary, Rotation, sinusoid_table
from tfexport.nn.recurrence import recurrent_layer

_rotary = functools.lru_cache(maxsize=256)(Rotary)
_INITIALIZERS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


class Block(nn.Module):
    """One layer: self-attention, cross-attention in a decoder, feed-forward and norms."""

    def __init__(self, config: TransformerConfig, side: Side) -> None:
        super().__init__()
        stack = config.stack(side)
        self.norm_place, self.parallel = stack.norm_place, stack.parallel
        is_sandwich = stack.norm_place == "sandwich"
        self.residual_scale = stack.residual_scale
        self.dropout = nn.Dropout(config.dropout)
        has_attention = stack.mixer == "attention"
        self.self = _attention(config, side) if has_attention else recurrent_layer(config)
        self.norm1 = LayerNorm(config, side)
        self.norm2 = LayerNorm(config, side)
        self.post_norm1 = LayerNorm(config, side) if is_sandwich else None
        self.post_norm2 = LayerNorm(config, side) if is_sandwich else None
        if side == "decoder":
            self.cross = _attention(config, side, config.width("encoder"))
            self.norm3 = LayerNorm(config, side)
            self.post_norm3 = LayerNorm(config, side) if is_sandwich else None
        self.rel_bias = _relative_bias(config, side) if config.relative_bias == "t5_per_layer" else None
        self.ffn = FeedForward(config, side)

    def residual(self, x: Tensor, *attentions: Callable[[Tensor], Tensor]) -> Tensor:
        """Add attentions and the network to `x` [tokens, d_model], with the norms."""
        groups = [[place] for place in range(len(attentions) + 1)]
        if (place := ("self", "cross", "none").index(self.parallel)) < len(attentions):
            groups[place] += groups.pop()
        sublayers: tuple[Callable[[Tensor], Tensor], ...] = (*attentions, self.ffn)
        for group in groups:
            y = self.residual_scale * x
            for number in group:
                norm, post_norm = getattr(self, f"norm{number + 1}"), getattr(self, f"post_norm{number + 1}")
                added = sublayers[number](x if self.norm_place == "post" else norm(x))
                y = y + self.dropout(post_norm(added) if self.norm_place == "sandwich" else added)
            x = norm(y) if self.norm_place == "post" else y
        return x


class Stack(nn.Module):
    """One side: embedding, positions, blocks and the optional norms around them."""

    def __init__(self, config: TransformerConfig, side: Side, vocab: int, max_length: int) -> None:
        super().__init__()
        stack = config.stack(side)
        self.embedding_scale: float = config.value(side, "embedding_scale")
        self.front = front_end(config) if side == "encoder" else None
        if self.front is None:
            self.embed = nn.Embedding(vocab, config.width(side))
        # A parameter, so that it is saved and can be trained; frozen, because the paper's table is fixed.
        has_table = config.positions == "table"
        self.pos = nn.Parameter(torch.empty(max_length, config.width(side)), requires_grad=False) if has_table else None
        self.emb_norm = LayerNorm(config, side) if config.value(side, "embedding_norm") else None
        self.rel_bias = _relative_bias(config, side) if config.relative_bias == "t5" else None
        self.set_positions(config, side)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, side) for _ in range(stack.layers))
        self.norm = LayerNorm(config, side) if stack.final_norm else None

    def set_positions(self, config: TransformerConfig, side: Side) -> None:
        """Set up rotary positions and ALiBi, which have no parameters."""
        stack, width = config.stack(side), config.d_k(side)
        dim, is_rotary = config.rotary_dim or width, config.positions == "rotary"
        scaling = config.rotary_scaling, config.rotary_factor, config.rotary_original_length
        self.rotary = _rotary(config.rotary_base, dim, width, config.rotary_pairs, scaling) if is_rotary else None
        self.alibi = Alibi(stack.num_heads) if config.relative_bias == "alibi" else None

    def read(self, x: Tensor, source: Source) -> tuple[Tensor, Source]:
        """Return vectors [batch, source_len, d_model] of a source, and their attention."""
        if self.front is None:
            return self.embed(x), source
        x, mask = self.front(x, source.mask)
        return x, source.with_mask(mask)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Scale vectors [rows, len, d_model] and add `positions` [rows or 1, len].

        The result is [rows · len, d_model].
        """
        x = x * self.embedding_scale
        if self.pos is not None:
            x = x + F.embedding(positions, self.pos)
        x = x.flatten(0, 1)
        if self.emb_norm is not None:
            x = self.emb_norm(x)
        return self.dropout(x)  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.blocks[0].norm1.weight.dtype

    @property
    def blocks(self) -> Sequence[Block]:
        """The layers in order, with their type."""
        return cast("Sequence[Block]", self.layers)

    def biases(self, positions: Tensor, key_len: int) -> Sequence[Tensor | None]:
        """Return the bias of each layer's scores, [rows or 1, heads, len, key_len]."""
        if self.alibi is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            return [self.alibi.bias(positions, key_len, wide)] * len(self.layers)
        first = self.rel_bias or self.blocks[0].rel_bias
        if first is None:
            return [None] * len(self.layers)
        bucket = first.bucket(positions, key_len)
        if self.rel_bias is not None:
            return [self.rel_bias(bucket)] * len(self.layers)
        return [cast(RelativeBias, block.rel_bias)(bucket) for block in self.blocks]

    def rotation(self, positions: Tensor, rows: int) -> Rotation | None:
        """Return the rotation of tokens at `positions`, int64 [rows or 1, len], if rotary."""
        return None if self.rotary is None else self.rotary.at(positions.expand(rows, -1), self.dtype)


class Transformer(nn.Module):
    """An encoder, a decoder and an output projection, or an encoder and a head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_dropout = config.dropout
        self.enc = Stack(config, "encoder", config.source_vocab, config.max_source_length)
        self.dec: Stack | None = None
        self.out: nn.Linear | None = None
        if config.target_vocab is not None and config.max_target_length is not None:
            self.dec = Stack(config, "decoder", config.target_vocab, config.max_target_length)
            self.out = nn.Linear(config.d_model, config.target_vocab, bias=config.output_bias)
        self.head = nn.Linear(config.d_model, len(config.labels)) if config.labels else None
        self._initialize()
        self._tie()

    @classmethod
    def unfilled(cls, config: TransformerConfig) -> Transformer:
        """Allocate a model whose parameters the caller must fill, tied parameters once."""
        with on_meta():
            model = cls(config)
        model.to_empty(device="cpu")
        model._tie()
        return model

    def forward(self, x: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Compute the logits of every target position at once, as in training.

        `x` and `source_mask` (True = token or frame) are a source as `tfexport.nn.source.encoder_inputs` returns it.
        `target_ids` [batch, target_len] are the start token, the labels and padding. Logits are float32 or wider,
        [batch, target_len, target_vocab].
        """
        dropout = self.attention_dropout if self.training else 0.0
        states, source = self._encode(x, Source(source_mask, dropout=dropout))
        cross = Cross(self._cross(states, source), source.mask, dropout=dropout)
        hidden = self._decode(target_ids, cross, self.empty_cache(target_ids, dropout=dropout))
        return self._project(hidden).unflatten(0, target_ids.shape)  # type: ignore[no-any-return, no-untyped-call]

    def hidden_states(self, x: Tensor, source_mask: Tensor) -> Tensor:
        """Encode sources to states [batch, source_len, d_model], undefined at padding."""
        hidden, source = self._encode(x, Source(source_mask))
        return hidden.unflatten(0, source.mask.shape)  # type: ignore[no-any-return, no-untyped-call]

    def classify(self, states: Tensor, source_mask: Tensor) -> Tensor:
        """Return the head's logits, [batch, source_len, labels] or [batch, labels].

        `source_mask` is that of the states, `tfexport.nn.source.position_mask`.
        """
        assert self.head is not None
        if self.config.head == "sequence":
            states = _pooled(states, source_mask[:, :, None], self.config.pooling)
        logits = self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # type: ignore[no-any-return]

    def encode(self, x: Tensor, source: Source) -> list[KeyValue]:
        """Encode sources to the cross-attention keys and values of each decoder layer."""
        return self._cross(*self._encode(x, source))

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache | StateCache) -> Tensor:
        """Return the logits of the last position, float32 or wider [rows, target_vocab]."""
        hidden = self._decode(target_ids, cross, cache)
        return self._project(hidden.unflatten(0, target_ids.shape)[:, -1])  # type: ignore[no-untyped-call]

    def empty_cache(self, target_ids: Tensor, *, dropout: float = 0.0) -> ConcatCache | StateCache:
        """Return a cache without past for the first tokens, int64 [rows, target_len]."""
        kind = model_spec(self.config, "fp32").cache
        return empty_cache(kind, target_ids, self._decoder.embed.weight, dropout=dropout)

    def shorten(self, max_source_length: int | None, max_target_length: int | None) -> None:
        """Limit the lengths and cut the position tables; None keeps a length."""
        lengths = {"max_source_length": max_source_length, "max_target_length": max_target_length}
        limits: dict[str, Any] = {name: length for name, length in lengths.items() if length is not None}
        problems = []
        for name, length in limits.items():
            most = getattr(self.config, name)
            if most is None:
                problems.append(f"{name} is {length}, but the model has no decoder; leave it out")
            elif length > most and self.config.positions == "table":
                table = f"the model's position table of {most}"
                problems.append(f"{name} is {length}, above {table}; ask for {most} or less")
        raise_all(ConfigError, "export", problems)
        self.config = dataclasses.replace(self.config, **limits)
        for stack, rows in ((self.enc, self.config.max_source_length), (self.dec, self.config.max_target_length)):
            if stack is not None and stack.pos is not None and len(stack.pos) != rows:
                stack.pos = nn.Parameter(stack.pos[:rows].clone(), requires_grad=False)

    def _encode(self, x: Tensor, source: Source) -> tuple[Tensor, Source]:
        """Return states [batch · source_len, d_model], and the attention between them."""
        enc = self.enc
        x, source = enc.read(x, source)
        batch, source_len = x.shape[:2]
        positions = torch.arange(source_len, device=x.device)[None]
        biases, rotation = enc.biases(positions, source_len), enc.rotation(positions, batch)
        x = enc.placed(x, positions)
        for i, block in enumerate(enc.blocks):
            attend = partial(block.self, cache=source, layer=i, bias=biases[i], rotation=rotation)
            x = block.residual(x, attend)
        return x if enc.norm is None else enc.norm(x), source

    def _cross(self, states: Tensor, source: Source) -> list[KeyValue]:
        batch, source_len = source.mask.shape
        positions = torch.arange(source_len, device=states.device)[None]
        rotation = self._decoder.rotation(positions, batch) if self.config.rotary_cross else None
        return [block.cross.key_value(states, batch, rotation) for block in self._decoder.blocks]

    def _decode(self, target_ids: Tensor, cross: Cross, cache: Cache | StateCache) -> Tensor:
        dec = self._decoder
        biases = dec.biases(cache.positions, cache.key_len)
        rotation = dec.rotation(cache.positions, target_ids.shape[0])
        cross_rotation = rotation if self.config.rotary_cross else None
        x = dec.placed(dec.embed(target_ids), cache.positions)
        for i, block in enumerate(dec.blocks):
            attend = partial(block.self, cache=cache, layer=i, bias=biases[i], rotation=rotation)
            attend_source = partial(block.cross.attend_source, cross=cross, layer=i, rotation=cross_rotation)
            x = block.residual(x, attend, attend_source)
        return x if dec.norm is None else dec.norm(x)

    def _project(self, x: Tensor) -> Tensor:
        assert self.out is not None
        logits = self.out(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.config.logit_scale
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @property
    def _decoder(self) -> Stack:
        assert self.dec is not None
        return self.dec

    def _tie(self) -> None:
        if self.dec is not None and self.config.tie_embeddings:
            self.dec.embed.weight = self.enc.embed.weight
        if self.dec is not None and self.out is not None and self.config.tie_output:
            self.out.weight = self.dec.embed.weight

    def _initialize(self) -> None:
        if next(self.parameters()).is_meta:
            return
        for stack in (self.enc, self.dec):
            if stack is not None and stack.pos is not None:
                stack.pos.copy_(sinusoid_table(*stack.pos.shape))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def _attention(config: TransformerConfig, side: Side, source_width: int | None = None) -> MultiHeadAttention:
    heads, kv_heads, d_k = config.stack(side).num_heads, config.num_kv_heads(side), config.d_k(side)
    widths = (d_k, d_k) if config.qk_norm == "head" else (heads * d_k, kv_heads * d_k)
    norms = LayerNorm(config, side, widths[0]), LayerNorm(config, side, widths[1])
    return MultiHeadAttention(
        config.width(side),
        heads,
        d_k,
        config.d_v(side),
        scale=config.attention_scale,
        bias=config.attention_bias,
        source_width=source_width,
        num_kv_heads=kv_heads,
        softcap=config.attention_softcap,
        qk_norm=config.qk_norm,
        norms=None if config.qk_norm == "none" else norms,
    )


def _pooled(states: Tensor, keep: Tensor, pooling: Pooling) -> Tensor:
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return states.masked_fill(~keep, float("-inf")).amax(1)
    wide = states.to(torch.promote_types(states.dtype, torch.float32)).masked_fill(~keep, 0)
    return (wide.sum(1) / keep.sum(1)).to(states.dtype)


def _relative_bias(config: TransformerConfig, side: Side) -> RelativeBias:
    buckets, heads = config.relative_buckets, config.stack(side).num_heads
    return RelativeBias(buckets, config.relative_max_distance, heads, bidirectional=side == "encoder")


@contextmanager
def on_meta() -> Iterator[None]:
    """Create modules on the device "meta" without drawing initial values."""
    # Drawing has no effect there, but a normal distribution makes PyTorch load its compiler, which takes seconds.
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _INITIALIZERS:
            return args[0] if args else options["tensor"]
        return func(*args, **options)
