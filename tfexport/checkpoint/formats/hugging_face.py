"""Hugging Face directories: which layout, switches, heads and tokens their config.json says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tfexport.errors import CheckpointError, raise_all, shortened
from tfexport.models.switches import Value

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}
_TOKENS = {"pad": "pad_token_id", "start": "decoder_start_token_id", "eos": "eos_token_id"}
# mT5 is T5 v1.1 by another name.
_FAMILIES = {"marian": "hf_marian", "bart": "hf_bart", "t5": "hf_t5", "mt5": "hf_t5"}
LAYOUTS = ("hf_marian", "hf_bart", "hf_t5", "hf_t5_v1_1")
# T5 takes texts of any length; this is what it was trained for.
_T5_LENGTH = 512


class _Reader:
    """Reads keys of config.json and keeps every problem."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def whole(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.problems.append(f"{name} is {shortened(value)}, expected a whole number")
        return 0

    def activation(self, name: str) -> str:
        value = self.config.get(name)
        if value not in _ACTIVATIONS:
            self.problems.append(f"{name} is {shortened(value)}, expected one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS.get(str(value), "relu")

    def tokens(self) -> dict[str, Value]:
        found: dict[str, Value] = {f"tokens.{ours}": self.whole(theirs) for ours, theirs in _TOKENS.items()}
        unknown = self.config.get("unk_token_id")
        return found | ({"tokens.unk": unknown} if isinstance(unknown, int) else {})


def family(config: Mapping[str, Any]) -> str:
    """Return the name of the built-in layout for a config.json.

    Raises:
        CheckpointError: it is of no family that is known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise CheckpointError(
            f"config.json: model_type is {shortened(model_type)}, expected {', '.join(_FAMILIES)}; "
            "import the weight file alone, with a layout or a golden"
        )
    return "hf_t5_v1_1" if _FAMILIES[model_type] == "hf_t5" and _is_gated(config) else _FAMILIES[model_type]


def settings(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Value]:
    """Return what a config.json says, as settings for `apply_layout`.

    Args:
        config: of a family that `family` knows.
        keys: of the state dict; a position table that is there needs no length.

    Raises:
        CheckpointError: lists every value that is missing or that the canonical model has no place for.
    """
    reader = _Reader(config)
    found = _t5(reader) if "num_heads" in config else _marian_like(reader, keys)
    raise_all(CheckpointError, "config.json", reader.problems)
    return found


def _marian_like(reader: _Reader, keys: Collection[str]) -> dict[str, Value]:
    for name in ("normalize_before", "add_final_layer_norm", "normalize_embedding"):
        expected = name == "normalize_embedding"
        if reader.config.get(name, expected) is not expected:
            reader.problems.append(f"{name} is {not expected}, which this layout is not for; write one of its own")
    found: dict[str, Value] = {
        "activation": reader.activation("activation_function"),
        "embedding_scale": "sqrt(d_model)" if reader.config.get("scale_embedding") else 1.0,
        "num_heads": reader.whole("encoder_attention_heads"),
        **reader.tokens(),
    }
    if reader.config.get("decoder_attention_heads") != found["num_heads"]:
        found["dec.num_heads"] = reader.whole("decoder_attention_heads")
    if not any(key.endswith("encoder.embed_positions.weight") for key in keys):
        found["max_length"] = reader.whole("max_position_embeddings")
    return found


def _t5(reader: _Reader) -> dict[str, Value]:
    config = reader.config
    # Older files have no such key: there the scale went with the tie.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    eps, distance = config.get("layer_norm_epsilon", 1e-6), config.get("relative_attention_max_distance", 128)
    feed_forward = str(config.get("feed_forward_proj", "relu"))
    # gated-gelu is the tanh form, whatever dense_act_fn an older file may say.
    activation = "gelu_tanh" if feed_forward == "gated-gelu" else _ACTIVATIONS.get(feed_forward.removeprefix("gated-"))
    if activation is None:
        reader.problems.append(f"feed_forward_proj is {shortened(feed_forward)}, expected {', '.join(_ACTIVATIONS)}")
    return {
        "activation": activation or "relu",
        "norm_eps": eps,
        "num_heads": reader.whole("num_heads"),
        "relative_max_distance": distance,
        "logit_scale": "d_model ** -0.5" if scaled else 1.0,
        "max_length": reader.whole("n_positions") if "n_positions" in config else _T5_LENGTH,
        **reader.tokens(),
    }


def _is_gated(config: Mapping[str, Any]) -> bool:
    return str(config.get("feed_forward_proj", "relu")).startswith("gated-")
