"""Models that together have every value of every switch that the backend `native` computes, and uneven widths."""

from __future__ import annotations

from tests import tiny

PRE = {"norm_place": "pre", "final_norm": True}
_LEAN = {"attention_bias": False, "feed_forward_bias": False, "output_bias": False, "norm_bias": False}
CONFIGS = {
    "post": tiny.config(decoder={"num_heads": 2, "layers": 3, "d_ff": 40}, tie_output=True),
    "rms glu": tiny.config(encoder=PRE, decoder=PRE, norm="rms", feed_forward="glu", activation="silu", **_LEAN),
    "std": tiny.config(encoder=PRE, norm="std", activation="gelu", positions="none", embedding_scale=5.0),
    "scaled": tiny.config(
        encoder={"residual_scale": 0.8, "activation": "quick_gelu", "feed_forward": "glu"},
        decoder={"residual_scale": 1.2, "activation": "relu2"},
        embedding_norm=True,
        attention_scale=0.5,
        logit_scale=0.7,
        tie_embeddings=True,
    ),
    "ssru": tiny.config(decoder={"mixer": "ssru", "residual_scale": 0.9}, activation="gelu_tanh"),
    "average": tiny.config(decoder={**PRE, "mixer": "average", "residual_scale": 1.1}, feed_forward="glu"),
    "average post": tiny.config(decoder={"mixer": "average"}),
    "one head": tiny.config(encoder={"num_heads": 1}, decoder={"num_heads": 16}, d_model=48, target_vocab=70),
}
