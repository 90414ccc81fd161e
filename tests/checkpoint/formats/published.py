"""Tiny directories with the keys of published ones: their config.json, the names of their weights, random values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

VOCAB = 41
SIDES = {
    f"{side}_{name}": value
    for side, layers in (("encoder", 2), ("decoder", 1))
    for name, value in (("layers", layers), ("attention_heads", 4), ("ffn_dim", 48), ("layerdrop", 0.0))
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "max_position_embeddings": 24,
    "is_encoder_decoder": True,
    "init_std": 0.02,
    "num_hidden_layers": 2,
    **SIDES,
}
_OLD_KEYS = {"add_bias_logits": False, "add_final_layer_norm": False, "normalize_before": False}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}

# What the config.json of each says, sizes apart.
CONFIGS: dict[str, dict[str, Any]] = {
    "opus-mt": {
        **_BART,
        **_OLD_KEYS,
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "activation_function": "swish",
        "bad_words_ids": [[40]],
        "bos_token_id": 0,
        "decoder_start_token_id": 40,
        "eos_token_id": 0,
        "max_length": 20,
        "normalize_embedding": False,
        "num_beams": 6,
        "pad_token_id": 40,
        "scale_embedding": True,
        "static_position_embeddings": True,
    },
    "bart-large-cnn": {
        **_BART,
        **_OLD_KEYS,
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "activation_function": "gelu",
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "early_stopping": True,
        "eos_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "length_penalty": 2.0,
        "no_repeat_ngram_size": 3,
        "normalize_embedding": True,
        "num_beams": 4,
        "pad_token_id": 1,
        "scale_embedding": False,
        "task_specific_params": {"summarization": {"num_beams": 4}},
    },
    "bart-base": {
        **_BART,
        **_OLD_KEYS,
        "model_type": "bart",
        "architectures": ["BartModel"],
        "activation_function": "gelu",
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "normalize_embedding": True,
        "pad_token_id": 1,
        "scale_embedding": False,
    },
    "mbart-large-50": {
        **_BART,
        "model_type": "mbart",
        "architectures": ["MBartForConditionalGeneration"],
        "activation_function": "relu",
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "normalize_before": True,
        "normalize_embedding": True,
        "pad_token_id": 1,
        "scale_embedding": True,
        "static_position_embeddings": False,
    },
    "mbart-large-cc25": {
        **_BART,
        "model_type": "mbart",
        "architectures": ["MBartForConditionalGeneration"],
        "activation_function": "gelu",
        "bos_token_id": 0,
        "decoder_start_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "scale_embedding": True,
    },
    "nllb-200-distilled": {
        **_BART,
        "model_type": "m2m_100",
        "architectures": ["M2M100ForConditionalGeneration"],
        "activation_function": "relu",
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "scale_embedding": True,
    },
    "pegasus-xsum": {
        **_BART,
        "model_type": "pegasus",
        "architectures": ["PegasusForConditionalGeneration"],
        "activation_function": "relu",
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "bos_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "extra_pos_embeddings": 1,
        "forced_eos_token_id": 1,
        "length_penalty": 0.6,
        "normalize_before": True,
        "normalize_embedding": False,
        "num_beams": 8,
        "pad_token_id": 0,
        "scale_embedding": True,
        "static_position_embeddings": True,
    },
    "blenderbot-400M-distill": {
        **_BART,
        "model_type": "blenderbot",
        "architectures": ["BlenderbotForConditionalGeneration"],
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "layernorm_variant": "prelayernorm",
        "min_length": 5,
        "normalize_before": True,
        "normalize_embedding": False,
        "num_beams": 10,
        "pad_token_id": 0,
        "scale_embedding": True,
        "static_position_embeddings": False,
    },
    "t5-small": {
        **_T5,
        "model_type": "t5",
        "architectures": ["T5WithLMHeadModel"],
        "n_positions": 24,
        "output_past": True,
        "relative_attention_num_buckets": 32,
    },
    "flan-t5-small": {
        **_T5,
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu",
        "n_positions": 24,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
    },
    "umt5-small": {
        **_T5,
        "model_type": "umt5",
        "architectures": ["UMT5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu",
        "relative_attention_max_distance": 20,
        "relative_attention_num_buckets": 8,
        "scalable_attention": True,
        "tie_word_embeddings": False,
    },
}
CLASSES = {
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}


def build(config: Mapping[str, Any]) -> Any:
    """Build the model of a config.json with random weights, tied as it says."""
    kind = getattr(transformers, CLASSES[config["model_type"]])
    model = kind(kind.config_class(**config))
    tiny.randomise(model)
    model.tie_weights()
    return model


def write(folder: Path, name: str, generation: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write a directory as it was published: every tied tensor under each of its names, as pytorch_model.bin had it."""
    said = {**CONFIGS[name], **changes}
    model = build(said)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(said))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save(folder, as_published(name, model.state_dict()))
    return folder


def as_published(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name weights as the published file does."""
    tensors = dict(state)
    if name == "t5-small":
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.randn(32, 4)
    if name == "bart-large-cnn":
        tensors |= {f"model.{side}.version": torch.tensor([2.0]) for side in ("encoder", "decoder")}
    if name == "bart-base":
        tensors = {key.removeprefix("model."): t for key, t in tensors.items() if key.startswith("model.")}
    if name.startswith(("opus-mt", "t5", "bart-large-cnn")):
        del tensors["lm_head.weight"]
    return tensors


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> Any:
    """Load a directory with transformers itself, in float64."""
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, CLASSES[config["model_type"]]).from_pretrained(folder).double().eval()
    if config["model_type"] == "umt5":
        # transformers 5 scales its logits whatever the file says; 4 did not, and so the published ones were trained.
        model.config.tie_word_embeddings = config.get("tie_word_embeddings", True)
    return model
