"""The concat form: what eager computes, traced as it is. Every runtime that reads ONNX can run it."""

from __future__ import annotations

from tfexport.contract import Precision
from tfexport.export.decoders.form import OUTSIDE_ATTENTION, DecoderForm, Seam, Supported, unsupported
from tfexport.nn.cache import ConcatCache
from tfexport.nn.config import TransformerConfig

SUPPORTED: Supported = {
    **OUTSIDE_ATTENTION,
    "positions": ("table", "none", "rotary"),
    "relative_bias": ("none", "t5", "t5_per_layer", "alibi"),
    **dict.fromkeys(
        ("num_heads", "num_kv_heads", "d_k", "d_v", "attention_bias", "attention_scale", "attention_softcap")
    ),
    **dict.fromkeys(("relative_buckets", "relative_max_distance")),
    **dict.fromkeys(("rotary_base", "rotary_dim", "rotary_pairs", "rotary_cross")),
}


def supports(config: TransformerConfig | Seam, precision: Precision) -> list[str]:
    """Say what of a model this form cannot do; a module of its own is traced as it is written."""
    return [] if isinstance(config, Seam) else unsupported(config, SUPPORTED)


CONCAT = DecoderForm(supports=supports, cache=ConcatCache)
