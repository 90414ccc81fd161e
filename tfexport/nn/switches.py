"""The switches of the canonical model: names, values and search order.

Real implementations differ in these settings, and tensor names and shapes do not reveal them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from tfexport.contract import Head, Pooling

Value = bool | int | float | str | None
Place = Literal["embedding", "residual", "norm", "feed-forward", "positions", "attention", "cross-attention", "output"]

NormPlace = Literal["post", "pre", "sandwich"]
Mixer = Literal["attention", "ssru", "average"]
Parallel = Literal["none", "self", "cross"]
Norm = Literal["layernorm", "std", "rms"]
Activation = Literal["relu", "gelu", "silu", "gelu_tanh", "quick_gelu", "relu2"]
QkNorm = Literal["none", "head", "all"]
FeedForward = Literal["mlp", "glu"]
RelativeBias = Literal["none", "t5", "t5_per_layer", "alibi"]
Positions = Literal["table", "none", "rotary"]
RotaryPairs = Literal["halves", "interleaved"]
RotaryScaling = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A setting in which implementations differ."""

    values: tuple[str, ...] | type  # names, the most common first; numbers may be arithmetic in d_model, num_heads, d_k
    acts: Place  # the part of the model that it affects
    default: Value = None  # if a layout does not give it; None if a layout has to
    per_side: bool = False  # whether encoder and decoder may differ
    search: tuple[Value, ...] = ()  # values that an import tries; empty if tensor names and shapes determine it
    where: tuple[str, tuple[Value, ...]] | None = None  # another switch and its values with which this one acts
    rare: bool = False  # whether an import tries it only after everything else is found


_ROTARY = ("positions", ("rotary",))
_LENGTHS = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16)  # of texts before positions were scaled
_rotary = partial(Switch, acts="positions", where=_ROTARY, rare=True)

SWITCHES: dict[str, Switch] = {
    "norm_place": Switch(values=get_args(NormPlace), acts="residual", per_side=True, search=("post", "pre")),
    "mixer": Switch(values=get_args(Mixer), acts="attention", default="attention", per_side=True),
    "parallel": Switch(values=get_args(Parallel), acts="residual", default="none", per_side=True),
    "final_norm": Switch(values=bool, acts="norm", default=False, per_side=True),
    "embedding_norm": Switch(values=bool, acts="embedding", default=False),
    "norm": Switch(values=get_args(Norm), acts="norm", search=get_args(Norm)),
    "norm_eps": Switch(values=float, acts="norm", search=(1e-5, 1e-6, 1e-12, 1e-8, 1e-9, 1e-7, 1e-10, 1e-4, 1e-3, 0.0)),
    "qk_norm": Switch(values=get_args(QkNorm), acts="norm", default="none"),
    "activation": Switch(
        values=get_args(Activation), acts="feed-forward", search=("relu", "gelu", "silu", "gelu_tanh")
    ),
    "feed_forward": Switch(values=get_args(FeedForward), acts="feed-forward", default="mlp"),
    "relative_bias": Switch(values=get_args(RelativeBias), acts="attention", default="none"),
    "relative_max_distance": Switch(
        values=int, acts="attention", default=128, where=("relative_bias", ("t5", "t5_per_layer"))
    ),
    "residual_scale": Switch(values=float, acts="residual", default=1.0, per_side=True),
    "positions": Switch(values=get_args(Positions), acts="positions", default="table"),
    "rotary_base": _rotary(values=float, default=10000.0, search=(10000.0, 500000.0, 1000000.0)),
    "rotary_dim": _rotary(values=int, default="d_k", search=("d_k", "d_k / 2")),
    "rotary_scaling": _rotary(values=get_args(RotaryScaling), default="none", search=get_args(RotaryScaling)),
    "rotary_factor": _rotary(
        values=float, default=8.0, search=(8.0, 4.0, 2.0, 16.0, 32.0), where=("rotary_scaling", ("linear", "llama3"))
    ),
    "rotary_original_length": _rotary(values=int, default=8192, search=_LENGTHS, where=("rotary_scaling", ("llama3",))),
    "rotary_pairs": _rotary(values=get_args(RotaryPairs), default="halves", search=get_args(RotaryPairs), rare=False),
    "rotary_cross": Switch(values=bool, acts="cross-attention", default=False, search=(False, True), where=_ROTARY),
    "embedding_scale": Switch(values=float, acts="embedding", default=1.0, search=("sqrt(d_model)", 1.0)),
    "attention_scale": Switch(
        values=float, acts="attention", default="d_k ** -0.5", search=("d_k ** -0.5", 1.0, "d_model ** -0.5")
    ),
    "attention_softcap": Switch(values=float, acts="attention", default=0.0, search=(0.0, 50.0), rare=True),
    "logit_scale": Switch(values=float, acts="output", default=1.0, search=(1.0, "d_model ** -0.5")),
    "logit_softcap": Switch(values=float, acts="output", default=0.0, search=(0.0, 30.0), rare=True),
    "head": Switch(values=get_args(Head), acts="output", default="none"),
    "pooling": Switch(values=get_args(Pooling), acts="output", default="mean", search=get_args(Pooling)),
}
