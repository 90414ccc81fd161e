"""The configuration of a canonical transformer: its sizes and its switches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from tfexport.errors import ConfigError
from tfexport.fields import Config, size_problems
from tfexport.models.switches import (
    SWITCHES,
    Activation,
    FeedForward,
    Norm,
    NormPlace,
    Positions,
    RelativeBias,
    Value,
)
from tfexport.spec import ModelSpec, Precision, TokenIds


@dataclass(frozen=True, kw_only=True)
class StackConfig(Config, subject="stack"):
    """Sizes and norm placement of one side, encoder or decoder.

    `d_k` and `d_v` are the width of one head's keys and values; None means
    d_model / num_heads.
    """

    layers: int
    num_heads: int
    d_ff: int
    norm_place: NormPlace
    final_norm: bool
    d_k: int | None = None
    d_v: int | None = None

    def _problems(self) -> list[str]:
        return size_problems(self, "layers", "num_heads", "d_ff", "d_k", "d_v")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config, subject="model"):
    """The canonical transformer: free sizes and switches.

    What the switches do stands in models/README.md, what values they have in
    `tfexport.models.switches`. `decoder` is None for an encoder alone.

    `attention_scale` None means 1/sqrt(d_k). `tie_embeddings` shares one table
    between encoder and decoder, `tie_output` uses the decoder's table as the
    output projection. `max_source_length` and `max_target_length` are the rows
    of the position tables, and the limits where there is no table.
    """

    d_model: int
    source_vocab: int
    max_source_length: int
    encoder: StackConfig
    decoder: StackConfig | None
    tokens: TokenIds
    target_vocab: int | None = None
    max_target_length: int | None = None
    embedding_norm: bool = False
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "relu"
    feed_forward: FeedForward = "mlp"
    relative_bias: RelativeBias = "none"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    residual_scale: float = 1.0
    positions: Positions = "table"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    output_bias: bool = True
    tie_embeddings: bool = False
    tie_output: bool = False
    dropout: float = 0.1

    def _problems(self) -> list[str]:
        return [*self._size_problems(), *self._decoder_problems()]

    def _size_problems(self) -> list[str]:
        problems = size_problems(
            self,
            "d_model",
            "source_vocab",
            "target_vocab",
            "max_source_length",
            "max_target_length",
            "relative_max_distance",
        )
        for side, stack in () if problems else (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack and self.d_model % stack.num_heads and not (stack.d_k and stack.d_v):
                problems.append(
                    f"{side}.num_heads is {stack.num_heads}, which does not divide d_model {self.d_model}; "
                    f"change one of them or give {side}.d_k and {side}.d_v"
                )
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, expected 0 or more and below 1")
        if self.norm_eps < 0:
            problems.append(f"norm_eps is {self.norm_eps}, expected 0 or more")
        if self.relative_bias != "none":
            problems += size_problems(self, "relative_buckets", least=4)
        return problems

    def _decoder_problems(self) -> list[str]:
        problems: list[str] = []
        vocabularies = [("source_vocab", self.source_vocab)]
        if self.decoder is None:
            needless = [name for name in ("target_vocab", "max_target_length") if getattr(self, name) is not None]
            problems += [f"{name} is given but decoder is null; leave it out" for name in needless]
            if self.tie_embeddings or self.tie_output:
                problems.append("tie_embeddings and tie_output need a decoder; set both to false")
        else:
            missing = [name for name in ("target_vocab", "max_target_length") if getattr(self, name) is None]
            problems += [f"missing key {name}, needed with a decoder" for name in missing]
            if self.target_vocab is not None:
                vocabularies.append(("target_vocab", self.target_vocab))
                if self.tie_embeddings and self.source_vocab != self.target_vocab:
                    problems.append(
                        f"tie_embeddings needs equal vocabularies, got source_vocab {self.source_vocab} "
                        f"and target_vocab {self.target_vocab}"
                    )
        source_side = ("pad", "unk")
        for name, token in dataclasses.asdict(self.tokens).items():
            vocabulary, size = vocabularies[0] if name in source_side else vocabularies[-1]
            if token is not None and token >= size:
                problems.append(f"tokens.{name} is {token}, expected below {vocabulary} {size}")
        return problems

    def switches(self) -> dict[str, Value]:
        """Return the value of every switch by its name; of a side's own as `enc.NAME` and `dec.NAME`."""
        stacks = [("enc.", self.encoder), ("dec.", self.decoder)]
        return {
            prefix + name: getattr(holder, name)
            for name, switch in SWITCHES.items()
            for prefix, holder in (stacks if switch.per_side else [("", self)])
            if holder is not None
        }

    def num_heads(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the number of attention heads of one side."""
        return self._stack(side).num_heads

    def d_k(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the width of one head's queries and keys on one side."""
        stack = self._stack(side)
        return stack.d_k or self.d_model // stack.num_heads

    def d_v(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the width of one head's values on one side."""
        stack = self._stack(side)
        return stack.d_v or self.d_model // stack.num_heads

    def _stack(self, side: Literal["encoder", "decoder"]) -> StackConfig:
        stack = self.encoder if side == "encoder" else self.decoder
        if stack is None:
            raise ConfigError("model: this is an encoder alone and has no decoder")
        return stack


def model_spec(config: TransformerConfig, precision: Precision) -> ModelSpec:
    """Derive the specification of a canonical transformer."""
    shared = {
        "d_model": config.d_model,
        "source_vocab": config.source_vocab,
        "max_source_length": config.max_source_length,
        "tokens": config.tokens,
        "precision": precision,
    }
    if config.decoder is None:
        return ModelSpec(**shared)  # type: ignore[arg-type]
    return ModelSpec(
        **shared,  # type: ignore[arg-type]
        vocab=config.target_vocab or 0,
        layers=config.decoder.layers,
        heads=config.decoder.num_heads,
        head_dim=config.d_k("decoder"),
        value_dim=config.d_v("decoder"),
        max_target_length=config.max_target_length or 0,
    )
