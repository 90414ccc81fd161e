"""Define T5, mT5 and UMT5."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfexport.importing.huggingface import Family, Reader
from tfexport.nn.switches import Value

_LENGTH = 512  # T5 has no maximum length; it was trained with this one
# Values of transformers for keys that a config.json may lack.
_DEFAULTS = {"num_layers": 6, "feed_forward_proj": "relu"}
_DEFAULTS_OF_MT5 = {"num_layers": 8, "feed_forward_proj": "gated-gelu"}
_UNUSED = ("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",)


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    config = reader.config
    reader.check_layers("num_layers", "encoder", keys)
    # Older files of T5 have one number for both sides.
    reader.check_layers(
        "num_layers" if config.get("num_decoder_layers") is None else "num_decoder_layers", "decoder", keys
    )
    # Older files have no scale_decoder_outputs: their tied models scale. mT5 never scales, regardless of what
    # transformers 5 writes.
    tied = config.get("tie_word_embeddings", True) and config["model_type"] != "mt5"
    scaled = config.get("scale_decoder_outputs", tied)
    feed_forward = str(config["feed_forward_proj"])
    # gated-gelu uses the tanh approximation, regardless of dense_act_fn in older files.
    activation = "gelu_new" if feed_forward == "gated-gelu" else feed_forward.removeprefix("gated-")
    return {
        **reader.activation("feed_forward_proj", activation),
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "num_heads": reader.whole("num_heads"),
        "relative_max_distance": config.get("relative_attention_max_distance", 128),
        "logit_scale": "d_model ** -0.5" if scaled else 1.0,
        "max_length": reader.whole("n_positions") if "n_positions" in config else _LENGTH,
    }


def _layout(config: Mapping[str, Any]) -> str:
    return "hf_t5_v1_1" if str(config.get("feed_forward_proj", "relu")).startswith("gated-") else "hf_t5"


def _family(model_type: str, layout: Callable[[Mapping[str, Any]], str]) -> Family:
    defaults = _DEFAULTS if model_type == "t5" else _DEFAULTS_OF_MT5
    return Family(model_type, layout, _settings, ("T5Tokenizer",), defaults, base="", is_tied=True, unused=_UNUSED)


FAMILIES = (_family("t5", _layout), _family("mt5", _layout), _family("umt5", lambda _: "hf_umt5"))
