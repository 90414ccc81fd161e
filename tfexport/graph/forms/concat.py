"""The concat form: what eager computes, traced as it is. Every runtime that reads ONNX can run it."""

from __future__ import annotations

from tfexport.graph.forms.form import OUTSIDE_ATTENTION, DecoderForm, Supported, unsupported
from tfexport.models.cache import ConcatCache
from tfexport.models.config import TransformerConfig
from tfexport.spec import Precision

SUPPORTED: Supported = {
    **OUTSIDE_ATTENTION,
    "positions": ("table", "none"),
    "relative_bias": ("none", "t5", "t5_per_layer"),
    **dict.fromkeys(("num_heads", "d_k", "d_v", "attention_bias", "attention_scale")),
    **dict.fromkeys(("relative_buckets", "relative_max_distance")),
}


def supports(config: TransformerConfig | None, precision: Precision) -> list[str]:
    """Say what of a model this form cannot do; a module of its own is traced as it is written."""
    return [] if config is None else unsupported(config, SUPPORTED)


CONCAT = DecoderForm(supports=supports, cache=ConcatCache)
