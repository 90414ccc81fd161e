"""Hugging Face directories: which layout, switches, heads and tokens their config.json says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tfexport.errors import CheckpointError, raise_all, shortened
from tfexport.nn.switches import Value

_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
_ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "silu")},
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "gelu_python": "gelu",
    "swish": "silu",
}
_FAMILIES = {
    "marian": "hf_marian",
    "bart": "hf_bart",
    "mbart": "hf_mbart",
    "pegasus": "hf_pegasus",
    "m2m_100": "hf_m2m_100",
    "blenderbot": "hf_blenderbot",
    "t5": "hf_t5",
    # mT5 is T5 v1.1 by another name.
    "mt5": "hf_t5",
    "umt5": "hf_umt5",
    "t5gemma": "hf_t5gemma",
}
_TOKENS = {"pad": "pad_token_id", "start": "decoder_start_token_id", "eos": "eos_token_id"}
LAYOUTS = (*dict.fromkeys(_FAMILIES.values()), "hf_t5_v1_1")
# Written into config.json once, and read by no model of today.
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
# What T5Gemma says for each side, and the canonical model has once.
_T5GEMMA_SHARED = (
    "attn_logit_softcapping",
    "hidden_activation",
    "hidden_size",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
# T5 takes texts of any length; this is what it was trained for.
_T5_LENGTH = 512


def is_known(config: Mapping[str, Any]) -> bool:
    """Say whether there is a layout for the family of a config.json."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in _FAMILIES


def family(config: Mapping[str, Any]) -> str:
    """Return the name of the built-in layout for a config.json.

    Raises:
        CheckpointError: it is of no family that is known.
    """
    model_type = config.get("model_type")
    if not is_known(config):
        raise CheckpointError(
            f"config.json: model_type is {shortened(model_type)}, expected {', '.join(_FAMILIES)}; record a golden "
            "beside its code and give --golden, see docs/hugging-face.md"
        )
    is_gated = str(config.get("feed_forward_proj", "relu")).startswith("gated-")
    return "hf_t5_v1_1" if _FAMILIES[str(model_type)] == "hf_t5" and is_gated else _FAMILIES[str(model_type)]


def unread(config: Mapping[str, Any]) -> list[str]:
    """Name the keys of a config.json that transformers does not read, and neither does an import."""
    return [name for name in _UNREAD if name in config]


def settings(
    config: Mapping[str, Any], generation: Mapping[str, Any], keys: Collection[str], given: Collection[str] = ()
) -> dict[str, Value]:
    """Return what a config.json says, as settings for `apply_layout`; what it leaves out is the layout's.

    Args:
        config: of a family that `family` knows.
        generation: generation_config.json, whose tokens come first, as in `generate`.
        keys: of the state dict; a position table that is there needs no length.
        given: settings that take the place of these.

    Raises:
        CheckpointError: lists every value that is missing or that the canonical model has no place for.
    """
    reader = _Reader(config)
    if config["model_type"] == "t5gemma":
        found = _t5gemma(reader)
    else:
        found = _t5(reader) if "num_heads" in config else _marian_like(reader, keys)
    found |= _tokens(reader, generation, given)
    raise_all(CheckpointError, "config.json", reader.problems)
    return found


def tokens(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Value]:
    """Return the ids of tokens that a directory of any family says, as settings."""
    return _tokens(_Reader(config), generation, ())


class _Reader:
    """Reads keys of config.json and keeps every problem."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self.config, self.prefix = config, prefix
        self.problems: list[str] = []

    def side(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        if isinstance(value, dict):
            return value
        self.problems.append(f"{name} is {shortened(value)}, expected its configuration")
        return {}

    def whole(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, int) and _is_whole(value):
            return value
        self.problems.append(f"{self.prefix}{name} is {shortened(value)}, expected a whole number")
        return 0

    def activation(self, name: str, value: object) -> dict[str, Value]:
        if isinstance(value, str) and value in _ACTIVATIONS:
            return {"activation": _ACTIVATIONS[value]}
        self.problems.append(f"{self.prefix}{name} is {shortened(value)}, expected one of {', '.join(_ACTIVATIONS)}")
        return {}


def _tokens(reader: _Reader, generation: Mapping[str, Any], given: Collection[str]) -> dict[str, Value]:
    decoder = reader.config.get("decoder")
    of_decoder = {"decoder_start_token_id": None, **decoder} if isinstance(decoder, dict) else {}
    said = {**of_decoder, **reader.config, **{name: value for name, value in generation.items() if value is not None}}
    if (
        "decoder_start_token_id" in said
        and said["decoder_start_token_id"] is None
        and _is_whole(said.get("bos_token_id"))
    ):
        said["decoder_start_token_id"] = said["bos_token_id"]  # as `generate` does
    found: dict[str, Value] = {}
    for ours, theirs in _TOKENS.items():
        value = said.get(theirs)
        if theirs == "eos_token_id" and isinstance(value, list) and value:
            value = value[0]  # one of several ends stands for all where one is needed
        if _is_whole(value):
            found[f"tokens.{ours}"] = value
        elif theirs in said and f"tokens.{ours}" not in given:
            reader.problems.append(
                f"{theirs} is {shortened(value)}, expected a whole number; give --set tokens.{ours}=ID"
            )
    unknown = said.get("unk_token_id")
    return found | ({"tokens.unk": unknown} if _is_whole(unknown) else {})


def _marian_like(reader: _Reader, keys: Collection[str]) -> dict[str, Value]:
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


def _t5(reader: _Reader) -> dict[str, Value]:
    config = reader.config
    # Older files have no such key: there the scale went with the tie. mT5 has none, whatever transformers 5 writes.
    tied = config.get("tie_word_embeddings", True) and config["model_type"] != "mt5"
    scaled = config.get("scale_decoder_outputs", tied)
    feed_forward = str(config.get("feed_forward_proj", "relu"))
    # gated-gelu is the tanh form, whatever dense_act_fn an older file may say.
    activation = "gelu_new" if feed_forward == "gated-gelu" else feed_forward.removeprefix("gated-")
    return {
        **reader.activation("feed_forward_proj", activation),
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "num_heads": reader.whole("num_heads"),
        "relative_max_distance": config.get("relative_attention_max_distance", 128),
        "logit_scale": "d_model ** -0.5" if scaled else 1.0,
        "max_length": reader.whole("n_positions") if "n_positions" in config else _T5_LENGTH,
    }


def _t5gemma(reader: _Reader) -> dict[str, Value]:
    """Read both sides, which agree in all that the canonical model has once; a window is the longest text."""
    sides = {name: _Reader(reader.side(name), f"{name}.") for name in ("encoder", "decoder")}
    encoder, decoder = sides.values()
    problems = reader.problems
    problems += [
        f"encoder.{name} is {shortened(encoder.config.get(name))} and decoder.{name} is "
        f"{shortened(decoder.config.get(name))}, expected the same"
        for name in _T5GEMMA_SHARED
        if encoder.config.get(name) != decoder.config.get(name)
    ]
    if reader.config.get("is_encoder_decoder") is False:
        problems.append("is_encoder_decoder is False, expected a decoder too")
    found: dict[str, Value] = {
        **encoder.activation("hidden_activation", encoder.config.get("hidden_activation")),
        "num_heads": encoder.whole("num_attention_heads"),
        "dec.num_heads": decoder.whole("num_attention_heads"),
        "norm_eps": encoder.config.get("rms_norm_eps", 1e-6),
        "rotary_base": _rotary_base(encoder),
        "attention_scale": max(encoder.whole("query_pre_attn_scalar"), 1) ** -0.5,
        "attention_softcap": encoder.config.get("attn_logit_softcapping") or 0.0,
        "logit_softcap": decoder.config.get("final_logit_softcapping") or 0.0,
        "max_length": min(_longest(side) for side in sides.values()),
    }
    for side in sides.values():
        problems += side.problems
    return found


def _rotary_base(reader: _Reader) -> float:
    """Return the base of what is turned by position and nothing else."""
    said = reader.config.get("rope_parameters") or reader.config.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default")) if isinstance(said, dict) else said
    if kind != "default":
        reader.problems.append(f"{reader.prefix}rope_parameters has {shortened(kind)}, expected rope_type default")
        return 1.0
    base = said.get("rope_theta", reader.config.get("rope_theta", 10000.0))
    if isinstance(base, int | float) and base > 0:
        return float(base)
    reader.problems.append(f"{reader.prefix}rope_theta is {shortened(base)}, expected a number above 0")
    return 1.0


def _longest(reader: _Reader) -> int:
    """Return how long a text may be before a layer that attends in a window would no longer see all of it."""
    longest, kinds = reader.whole("max_position_embeddings"), reader.config.get("layer_types") or ["sliding_attention"]
    return min(longest, reader.whole("sliding_window")) if "sliding_attention" in kinds else longest


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
