"""The switches of a layout as values to try: which there are, and what each does to a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tfexport.checkpoint.layout.arithmetic import evaluate
from tfexport.checkpoint.layout.layout import Layout, Value, override
from tfexport.models.config import StackConfig, TransformerConfig

# Everything that implementations are known to use, the commonest first.
EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-9, 1e-7, 1e-10, 1e-4, 1e-3, 0.0)
OPTIONS: dict[str, tuple[Value, ...]] = {
    "enc.norm_place": ("post", "pre"),
    "dec.norm_place": ("post", "pre"),
    "norm": ("layernorm", "std", "rms"),
    "act": ("relu", "gelu", "silu", "gelu_tanh"),
    "emb_scale": ("sqrt(d_model)", 1.0),
    "attn_scale": ("d_k ** -0.5", 1.0, "d_model ** -0.5"),
    "logit_scale": (1.0, "d_model ** -0.5"),
    "norm_eps": EPS,
}
_FIELDS = {
    "norm": "norm",
    "norm_eps": "norm_eps",
    "act": "activation",
    "emb_scale": "embedding_scale",
    "attn_scale": "attention_scale",
    "logit_scale": "logit_scale",
}

Switches = Mapping[str, Value]


def options(config: TransformerConfig) -> dict[str, tuple[Value, ...]]:
    """Return the values to try for each switch of a model with these tensors."""
    found = dict(OPTIONS)
    if config.decoder is None:
        del found["dec.norm_place"], found["logit_scale"]
    # A norm with a bias is no rms; one without may be any.
    found["norm"] = ("layernorm", "std") if config.norm_bias else ("rms", "layernorm", "std")
    return found


def configured(config: TransformerConfig, switches: Switches) -> TransformerConfig:
    """Return a configuration of the same sizes with other switches.

    Args:
        config: of a canonical model.
        switches: values by name, as `OPTIONS` has them, and "n_heads" for both sides.
    """
    changes: dict[str, Any] = {}
    names = {"d_model": float(config.d_model), "d_k": float(config.d_k("encoder"))}
    stacks: dict[str, Any] = {"enc": config.encoder, "dec": config.decoder}
    heads = switches.get("n_heads")
    if isinstance(heads, int):
        stacks = {side: stack and _with_heads(stack, heads, config.d_model) for side, stack in stacks.items()}
        names["d_k"] = float(stacks["enc"].d_k)
    for name, value in switches.items():
        side, _, switch = name.rpartition(".")
        if switch == "norm_place":
            for one in (side,) if side else tuple(stacks):
                stacks[one] = stacks[one] and replace(stacks[one], norm_place=value)
        elif switch in _FIELDS:
            is_text = isinstance(value, str) and switch not in ("norm", "act")
            changes[_FIELDS[switch]] = evaluate(str(value), names) if is_text else value
    return replace(config, encoder=stacks["enc"], decoder=stacks["dec"], **changes)


def _with_heads(stack: StackConfig, heads: int, d_model: int) -> StackConfig:
    """Cut the same rows of queries into another number of heads."""
    d_k, d_v = ((width or d_model // stack.num_heads) * stack.num_heads // heads for width in (stack.d_k, stack.d_v))
    return replace(stack, num_heads=heads, d_k=d_k, d_v=d_v)


def with_switches(layout: Layout, switches: Switches) -> Layout:
    """Return a layout with switches, written as short as they can be."""
    found = dict(switches)
    places = [found.pop(name) for name in ("enc.norm_place", "dec.norm_place") if name in found]
    if len(set(places)) == 1:
        found["norm_place"] = places[0]
    elif places:
        found |= dict(zip(("enc.norm_place", "dec.norm_place"), places, strict=True))
    for name, usual in (("attn_scale", "d_k ** -0.5"), ("logit_scale", 1.0), ("emb_scale", 1.0)):
        if found.get(name) == usual:
            del found[name]
    return override(layout, found)
