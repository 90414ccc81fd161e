"""The switches as values to try: which there are for a model, and a configuration or layout with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tfexport.importing.layout.arithmetic import evaluate
from tfexport.importing.layout.layout import SIDES, Layout, override
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.switches import SWITCHES, Value

Switches = Mapping[str, Value]


def options(config: TransformerConfig) -> dict[str, tuple[Value, ...]]:
    """Return the values to try for each switch of a model with these tensors, those of a side as `enc.NAME`."""
    bases = {name: name.rpartition(".")[2] for name in config.switches()}
    found = {name: SWITCHES[base].search for name, base in bases.items() if SWITCHES[base].search and config.uses(base)}
    # What no tensor shows, where none shows another.
    is_free = config.positions != "table" and config.relative_bias in ("none", "alibi")
    if is_free:
        found["positions"] = ("none", "rotary")
    if is_free or config.relative_bias == "alibi":
        found["relative_bias"] = ("none", "alibi")
    for name, place in config.switches().items():
        if place == "sandwich":
            found[name] = ("sandwich", "pre")
    # A norm with a bias is no rms; one without may be any.
    centred = tuple(kind for kind in found["norm"] if kind != "rms")
    found["norm"] = centred if config.norm_bias else ("rms", *centred)
    # What changes least comes last.
    found["norm_eps"] = found.pop("norm_eps")
    return found


def configured(config: TransformerConfig, switches: Switches) -> TransformerConfig:
    """Return a configuration of the same sizes with other switches.

    Args:
        config: of a canonical model.
        switches: values by name, as `options` has them, and "num_heads" for both sides.
    """
    changes: dict[str, Any] = {}
    names = {"d_model": float(config.d_model), "d_k": float(config.d_k("encoder"))}
    stacks: dict[str, Any] = {"enc": config.encoder, "dec": config.decoder}
    heads = switches.get("num_heads")
    if isinstance(heads, int):
        stacks = {side: stack and _with_heads(stack, heads, config.d_model) for side, stack in stacks.items()}
        names["d_k"] = float(stacks["enc"].d_k)
    for name, value in switches.items():
        side, _, base = name.rpartition(".")
        switch = SWITCHES.get(base)
        if switch is None:
            continue
        if switch.per_side:
            for one in (side,) if side else tuple(stacks):
                stacks[one] = stacks[one] and replace(stacks[one], **{base: value})
        elif isinstance(value, str) and switch.values in (int, float):
            changes[base] = switch.values(evaluate(value, names))
        else:
            changes[base] = value
    return replace(config, encoder=stacks["enc"], decoder=stacks["dec"], **changes)


def _with_heads(stack: StackConfig, heads: int, d_model: int) -> StackConfig:
    """Cut the same rows of queries into another number of heads."""
    d_k, d_v = ((width or d_model // stack.num_heads) * stack.num_heads // heads for width in (stack.d_k, stack.d_v))
    kv_heads = stack.num_kv_heads and stack.num_kv_heads * heads // stack.num_heads
    return replace(stack, num_heads=heads, num_kv_heads=kv_heads, d_k=d_k, d_v=d_v)


def with_switches(layout: Layout, switches: Switches) -> Layout:
    """Return a layout with switches, written as short as they can be."""
    layout = override(layout, switches)
    arch = dict(layout.arch)
    for name, switch in SWITCHES.items():
        sides = [f"{side}.{name}" for side in SIDES]
        of_sides = [arch[side] for side in sides if side in arch]
        if len(of_sides) == len(sides) and len(set(of_sides)) == 1:
            arch = {key: value for key, value in arch.items() if key not in sides} | {name: of_sides[0]}
        for one in (name, *(sides if name not in arch else ())):
            if one in arch and arch[one] == switch.default:
                del arch[one]
    return replace(layout, arch=arch)
