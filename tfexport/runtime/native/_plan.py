"""List what the library computes, and the tensors of a model in its order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from tfexport.bundle.bundle import Bundle
from tfexport.contract import WEIGHTS
from tfexport.nn.config import Side, TransformerConfig
from tfexport.runtime.native import _library as library
from tfexport.runtime.native._weights import Tensor, Weights, joined

_NORMS = ("layernorm", "std", "rms")
_ACTIVATIONS = ("relu", "gelu", "silu", "gelu_tanh", "quick_gelu", "relu2")
# Widths of buffers are multiples of it.
_STEP = 16
_MIXERS = ("attention", "ssru", "average")
_SSRU = ("forget", "update")

# Fields of a configuration and the values that the library computes; None means every value. Other fields must have
# their default, so that a new switch is refused until it is added.
SUPPORTED: Mapping[str, Collection[object] | None] = {
    **dict.fromkeys(("d_model", "d_ff", "layers", "num_heads", "source_vocab", "target_vocab", "tokens", "dropout")),
    **dict.fromkeys(("max_source_length", "max_target_length", "tie_embeddings", "tie_output", "speech")),
    **dict.fromkeys(("attention_bias", "feed_forward_bias", "norm_bias", "output_bias")),
    **dict.fromkeys(("final_norm", "embedding_norm", "embedding_scale", "residual_scale", "norm_eps")),
    **dict.fromkeys(("attention_scale", "logit_scale", "head", "pooling", "labels")),
    "norm_place": ("post", "pre"),
    "norm": _NORMS,
    "activation": (*_ACTIVATIONS, None),
    "feed_forward": ("mlp", "glu", None),
    "positions": ("table", "none"),
    "mixer": _MIXERS,
    # They have no effect without the switches above that use them.
    **dict.fromkeys(("relative_buckets", "relative_max_distance", "rotary_base", "rotary_dim", "rotary_pairs")),
    **dict.fromkeys(("rotary_cross", "rotary_scaling", "rotary_factor", "rotary_original_length")),
}


def problems(bundle: Bundle) -> list[str]:
    """List what the library cannot compute of a bundle."""
    manifest, config = bundle.manifest, bundle.manifest.config
    if config is None or manifest.has_shortlist:
        return ["it has shortlists" if manifest.has_shortlist else "it holds graphs of an own module"]
    if manifest.spec.precision != "fp32":
        return [f"its precision is {manifest.spec.precision}, expected fp32 or int8"]
    if manifest.quantization is not None and manifest.quantization.weights != "int8":
        return [f"its weights are {manifest.quantization.weights}, expected fp32 or int8"]
    if found := config_problems(config):
        return found
    if WEIGHTS not in manifest.files:
        return ["it has no file of weights"]
    names = _Names(bundle.file(WEIGHTS))
    for _ in _Reader(config, names).tensors():
        pass
    return [f"its weights have no {name}, as equal tensors are stored once" for name in names.missing[:1]]


class _Names(Weights):
    """Finds the tensors that a weight file does not have, without reading the others."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.missing: list[str] = []

    def vector(self, name: str) -> Tensor:
        if not self.has(name):
            self.missing.append(name)
        return Tensor(0, np.zeros((1, 0), np.float32))

    def matrix(self, name: str, inputs: int, *, is_table: bool = False) -> Tensor:
        return self.vector(name)


def config_problems(config: TransformerConfig) -> list[str]:
    """List what the library cannot compute of a model."""
    if config.decoder is None:
        return ["it is encoder-only"]
    found = [*_field_problems("", config)]
    for side in ("encoder", "decoder"):
        found += _field_problems(f"{side}.", config.stack(side))
    if config.encoder.d_model not in (None, config.d_model):
        found.append(f"encoder.d_model is {config.encoder.d_model}, expected {config.d_model}")
    if config.d_model % _STEP:
        found.append(f"d_model is {config.d_model}, expected a multiple of {_STEP}")
    return found


def _field_problems(prefix: str, config: object) -> Iterator[str]:
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name in ("encoder", "decoder"):
            continue
        allowed = SUPPORTED.get(field.name, (field.default,))
        if allowed is not None and value not in allowed:
            yield f"{prefix}{field.name} is {value if isinstance(value, (str, int, float)) else type(value).__name__}"


def config_of(config: TransformerConfig) -> library.Config:
    """Return the configuration of a model without problems."""
    return library.Config(
        d_model=config.d_model,
        source_vocab=config.source_vocab,
        target_vocab=config.target_vocab,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        norm=_NORMS.index(config.norm),
        has_positions=config.positions == "table",
        is_tied=config.tie_embeddings,
        logit_scale=config.logit_scale,
        encoder=_stack(config, "encoder"),
        decoder=_stack(config, "decoder"),
    )


def _stack(config: TransformerConfig, side: Side) -> library.StackConfig:
    stack, width = config.stack(side), config.d_k(side)
    return library.StackConfig(
        layers=stack.layers,
        heads=stack.num_heads,
        head_width=width,
        d_ff=stack.d_ff,
        is_pre=stack.norm_place == "pre",
        final_norm=stack.final_norm,
        embedding_norm=config.value(side, "embedding_norm"),
        activation=_ACTIVATIONS.index(config.value(side, "activation")),
        glu=config.value(side, "feed_forward") == "glu",
        mixer=_MIXERS.index(stack.mixer),
        embedding_scale=config.value(side, "embedding_scale"),
        residual_scale=stack.residual_scale,
        norm_eps=config.value(side, "norm_eps"),
        attention_scale=width**-0.5 if config.attention_scale is None else config.attention_scale,
    )


class _Reader:
    """Yields the tensors of a model, None for a missing vector."""

    def __init__(self, config: TransformerConfig, weights: Weights) -> None:
        self._config, self._weights = config, weights

    def tensors(self) -> Iterator[Tensor | None]:
        config = self._config
        yield from self._side("encoder", "enc")
        yield from self._side("decoder", "dec")
        tied = "enc.embed.weight" if config.tie_embeddings else "dec.embed.weight"
        yield self._weights.matrix(tied if config.tie_output else "out.weight", config.d_model)
        yield self._weights.vector("out.bias") if config.output_bias else None

    def _side(self, side: Side, name: str) -> Iterator[Tensor | None]:
        config, stack, is_decoder = self._config, self._config.stack(side), side == "decoder"
        if not (is_decoder and config.tie_embeddings):
            yield self._table(f"{name}.embed.weight")
        if config.positions == "table":
            # Equal tables are stored once in a quantized bundle.
            shared = is_decoder and not self._weights.has("dec.pos")
            yield self._table("enc.pos" if shared else f"{name}.pos")
        if config.value(side, "embedding_norm"):
            yield from self._norm(f"{name}.emb_norm")
        for layer in range(stack.layers):
            yield from self._layer(f"{name}.layers.{layer}.", is_decoder=is_decoder, side=side)
        if stack.final_norm:
            yield from self._norm(f"{name}.norm")

    def _layer(self, name: str, *, is_decoder: bool, side: Side) -> Iterator[Tensor | None]:
        config, stack = self._config, self._config.stack(side)
        width, has_bias = stack.num_heads * config.d_k(side), config.attention_bias
        yield from self._norm(f"{name}norm1")
        if stack.mixer == "ssru":
            yield joined([self._weights.matrix(f"{name}self.{part}.weight", config.d_model) for part in _SSRU])
            bias = self._weights.vector(f"{name}self.forget.bias").values
            yield Tensor(2 * bias.size, np.concatenate((bias, np.zeros_like(bias)), 1))
        elif stack.mixer == "average":
            yield from self._network(f"{name}self.ffn", side)
            yield from self._linear(f"{name}self.input", config.d_model, has_bias=True)
            yield from self._linear(f"{name}self.forget", config.d_model, has_bias=True)
        else:
            yield from self._joint(f"{name}self", ("q", "k", "v"))
            yield from self._linear(f"{name}self.o", width, has_bias=has_bias)
        if is_decoder:
            yield from self._norm(f"{name}norm2")
            yield from self._linear(f"{name}cross.q", config.d_model, has_bias=has_bias)
            yield from self._joint(f"{name}cross", ("k", "v"))
            yield from self._linear(f"{name}cross.o", width, has_bias=has_bias)
        yield from self._norm(f"{name}norm{2 + is_decoder}")
        yield from self._network(f"{name}ffn", side)

    def _network(self, name: str, side: Side) -> Iterator[Tensor | None]:
        config, has_bias = self._config, self._config.feed_forward_bias
        for part in ("fc1", "gate") if config.value(side, "feed_forward") == "glu" else ("fc1",):
            yield from self._linear(f"{name}.{part}", config.d_model, has_bias=has_bias)
        yield from self._linear(f"{name}.fc2", config.stack(side).d_ff, has_bias=has_bias)

    def _table(self, name: str) -> Tensor:
        return self._weights.matrix(name, self._config.d_model, is_table=True)

    def _norm(self, name: str) -> Iterator[Tensor | None]:
        has_bias = self._config.norm_bias and self._config.norm != "rms"
        yield self._weights.vector(f"{name}.weight")
        yield self._weights.vector(f"{name}.bias") if has_bias else None

    def _linear(self, name: str, inputs: int, *, has_bias: bool) -> Iterator[Tensor | None]:
        yield self._weights.matrix(f"{name}.weight", inputs)
        yield self._weights.vector(f"{name}.bias") if has_bias else None

    def _joint(self, name: str, parts: tuple[str, ...]) -> Iterator[Tensor | None]:
        # A bundle with the contrib variant stores the joint matrix of its decoder.
        inputs, has_bias = self._config.d_model, self._config.attention_bias
        if self._weights.has(f"{name}.weight"):
            yield from self._linear(name, inputs, has_bias=has_bias)
            return
        yield joined([self._weights.matrix(f"{name}.{part}.weight", inputs) for part in parts])
        biases = [self._weights.vector(f"{name}.{part}.bias").values for part in parts] if has_bias else []
        yield Tensor(sum(bias.size for bias in biases), np.concatenate(biases, 1)) if biases else None


def tensors(config: TransformerConfig, weights: Path) -> Iterator[Tensor | None]:
    """Read the tensors of a model one at a time; None for missing biases."""
    return _Reader(config, Weights(weights)).tensors()
