"""Define BART and the families with its code: mBART, PEGASUS and Blenderbot."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tfexport.importing.huggingface import Family, Reader
from tfexport.nn.switches import Value

# Keys of published files that only fairseq or ParlAI reads.
_UNREAD = (
    "add_bias_logits",
    "add_final_layer_norm",
    "do_blenderbot_90_layernorm",
    "extra_layer_norm",
    "extra_pos_embeddings",
    "layernorm_variant",
    "normalize_before",
    "normalize_embedding",
    "static_position_embeddings",
)
_UNUSED = ("model.*coder.version", "model.*coder.embed_positions.weights")


def bart_like(model_type: str, *tokenizers: str, **more: Any) -> Family:
    """Return a family with BART's config.json and a layout named after its type."""
    layout = f"hf_{model_type}"
    return Family(model_type, lambda _: layout, _settings, tokenizers, unread=_UNREAD, unused=_UNUSED, **more)


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    config = reader.config
    found: dict[str, Value] = {
        "embedding_scale": "sqrt(d_model)" if config.get("scale_embedding") else 1.0,
        "num_heads": reader.whole("encoder_attention_heads"),
    }
    if "activation_function" in config:
        found |= reader.activation("activation_function", config["activation_function"])
    if config.get("decoder_attention_heads") != found["num_heads"]:
        found["dec.num_heads"] = reader.whole("decoder_attention_heads")
    if not any(key.endswith("encoder.embed_positions.weight") for key in keys):
        found["max_length"] = reader.whole("max_position_embeddings")
    return found


FAMILIES = (
    bart_like("bart", "BartTokenizer"),
    bart_like("mbart", "MBartTokenizer", "MBart50Tokenizer"),
    bart_like("pegasus", "PegasusTokenizer"),
    bart_like("blenderbot", "BlenderbotTokenizer"),
)
