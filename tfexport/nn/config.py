"""The configuration of a canonical transformer."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tfexport.config import MAX_SIZE, Config, Ge, Heads, Layers, Lt, Size
from tfexport.contract import ModelSpec, TokenIds
from tfexport.errors import ConfigError, shortened
from tfexport.nn.switches import (
    SWITCHES,
    Activation,
    FeedForward,
    Norm,
    NormPlace,
    Positions,
    QkNorm,
    RelativeBias,
    RotaryPairs,
    Value,
)
from tfexport.precision import Precision

Side = Literal["encoder", "decoder"]


class StackConfig(Config, subject="stack"):
    """Sizes and norm placement of one side, encoder or decoder.

    `d_k` and `d_v` are the widths of one head's keys and values; None means d_model / num_heads. If `num_kv_heads` is
    less than `num_heads`, adjacent heads share keys and values; None means `num_heads`.
    """

    layers: Layers
    num_heads: Heads
    d_ff: Size
    norm_place: NormPlace
    final_norm: bool
    d_k: Size | None = None
    d_v: Size | None = None
    num_kv_heads: Heads | None = None
    residual_scale: float = 1.0

    def _problems(self) -> Iterator[str]:
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            shared = f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads {self.num_heads}"
            yield f"{shared}; change one of them"


class TransformerConfig(Config, subject="model"):
    """The canonical transformer: sizes and switches.

    docs/reference/model.md describes the switches; `tfexport.nn.switches` lists their values. `decoder` is None for an
    encoder-only model.

    `attention_scale` None means 1/sqrt(d_k), and `rotary_dim` None means all of d_k. `tie_embeddings` shares one table
    between encoder and decoder; `tie_output` uses the decoder's table as the output projection. `max_source_length` and
    `max_target_length` are the number of rows of the position tables, or only limits if there are no tables.
    """

    d_model: Size
    source_vocab: Size
    max_source_length: Size
    encoder: StackConfig
    decoder: StackConfig | None
    tokens: TokenIds
    target_vocab: Size | None = None
    max_target_length: Size | None = None
    embedding_norm: bool = False
    norm: Norm = "layernorm"
    norm_eps: Annotated[float, Ge(0)] = 1e-5
    qk_norm: QkNorm = "none"
    activation: Activation = "relu"
    feed_forward: FeedForward = "mlp"
    relative_bias: RelativeBias = "none"
    relative_buckets: int = 32
    relative_max_distance: Size = 128
    positions: Positions = "table"
    rotary_base: float = 10000.0
    rotary_dim: Size | None = None
    rotary_pairs: RotaryPairs = "halves"
    rotary_cross: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: Annotated[float, Ge(0)] = 0.0
    logit_scale: float = 1.0
    logit_softcap: Annotated[float, Ge(0)] = 0.0
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    output_bias: bool = True
    tie_embeddings: bool = False
    tie_output: bool = False
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        # Earlier configurations had one residual scale for both sides.
        if "residual_scale" not in data:
            return data
        scale = {"residual_scale": data["residual_scale"]}
        sides = {side: {**scale, **data[side]} for side in ("encoder", "decoder") if isinstance(data.get(side), dict)}
        return {name: value for name, value in data.items() if name != "residual_scale"} | sides

    def _problems(self) -> Iterator[str]:
        for side, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack and self.d_model % stack.num_heads and not (stack.d_k and stack.d_v):
                yield (
                    f"{side}.num_heads is {stack.num_heads}, which does not divide d_model {self.d_model}; "
                    f"change one of them or give {side}.d_k and {side}.d_v"
                )
        if self.relative_bias != "none" and not 4 <= self.relative_buckets <= MAX_SIZE:
            yield f"relative_buckets is {shortened(self.relative_buckets)}, expected 4 to {MAX_SIZE}"
        if self.positions == "rotary":
            yield from self._rotary_problems()
        yield from self._decoder_problems()

    def _rotary_problems(self) -> Iterator[str]:
        if self.rotary_base <= 0:
            yield f"rotary_base is {self.rotary_base}, expected above 0"
        sides: list[Side] = ["encoder"] if self.decoder is None else ["encoder", "decoder"]
        for side in sides:
            width, dim = self.d_k(side), self.rotary_dim or self.d_k(side)
            if dim % 2 or dim > width:
                yield f"rotary_dim is {dim}, expected an even number up to d_k {width} of the {side}"

    def _decoder_problems(self) -> Iterator[str]:
        has_decoder = self.decoder is not None
        for name in ("target_vocab", "max_target_length"):
            if has_decoder and getattr(self, name) is None:
                yield f"missing key {name}, needed with a decoder"
            elif not has_decoder and getattr(self, name) is not None:
                yield f"{name} is given but decoder is null; leave it out"
        if not has_decoder and (self.tie_embeddings or self.tie_output):
            yield "tie_embeddings and tie_output need a decoder; set both to false"
        elif self.tie_embeddings and self.target_vocab not in (None, self.source_vocab):
            yield (
                f"tie_embeddings needs equal vocabularies, got source_vocab {self.source_vocab} "
                f"and target_vocab {self.target_vocab}"
            )
        for name, token in dataclasses.asdict(self.tokens).items():
            is_source = name in ("pad", "unk") or not has_decoder or self.target_vocab is None
            vocabulary = "source_vocab" if is_source else "target_vocab"
            if token is not None and token >= getattr(self, vocabulary):
                yield f"tokens.{name} is {token}, expected below {vocabulary} {getattr(self, vocabulary)}"

    def switches(self) -> dict[str, Value]:
        """Return the value of every switch; a side's switches are `enc.NAME`, `dec.NAME`."""
        stacks = [("enc.", self.encoder), ("dec.", self.decoder)]
        return {
            prefix + name: getattr(holder, name)
            for name, switch in SWITCHES.items()
            for prefix, holder in (stacks if switch.per_side else [("", self)])
            if holder is not None
        }

    def uses(self, name: str) -> bool:
        """Return whether a switch has an effect in this model."""
        switch = SWITCHES[name]
        if self.decoder is None and switch.acts in ("cross-attention", "output"):
            return False
        return switch.where is None or getattr(self, switch.where[0]) in switch.where[1]

    def stack(self, side: Side) -> StackConfig:
        """Return the configuration of one side."""
        stack = self.encoder if side == "encoder" else self.decoder
        if stack is None:
            raise ConfigError("model: this is an encoder-only model without a decoder")
        return stack

    def num_kv_heads(self, side: Side) -> int:
        """Return the number of key-value heads of one side."""
        return self.stack(side).num_kv_heads or self.stack(side).num_heads

    def d_k(self, side: Side) -> int:
        """Return the width of one head's queries and keys."""
        return self.stack(side).d_k or self.d_model // self.stack(side).num_heads

    def d_v(self, side: Side) -> int:
        """Return the width of one head's values."""
        return self.stack(side).d_v or self.d_model // self.stack(side).num_heads


def model_spec(config: TransformerConfig, precision: Precision) -> ModelSpec:
    """Derive the specification of a canonical transformer."""
    spec = ModelSpec(
        d_model=config.d_model,
        source_vocab=config.source_vocab,
        max_source_length=config.max_source_length,
        tokens=config.tokens,
        precision=precision,
    )
    if config.decoder is None:
        return spec
    return dataclasses.replace(
        spec,
        vocab=config.target_vocab or 0,
        layers=config.decoder.layers,
        heads=config.decoder.num_heads,
        head_dim=config.d_k("decoder"),
        value_dim=config.d_v("decoder"),
        kv_heads=config.decoder.num_kv_heads,
        max_target_length=config.max_target_length or 0,
    )
