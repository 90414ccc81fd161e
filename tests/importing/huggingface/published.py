"""Tiny directories as they were published: config.json, names of weights, random values.

Sizes and vocabularies are smaller. opus-mt and t5-small have every key of their config.json, the others those that
change what is computed or generated.
"""

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
from tfexport.generation import GenerationDefaults
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
VOCAB = 41
UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
CLASSES = {
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mvp": "MvpForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}


def build(config: Mapping[str, Any]) -> Any:
    """Build the model of a config.json with random weights, tied as it says."""
    kind = getattr(transformers, CLASSES[config["model_type"]])
    model = kind(kind.config_class.from_dict(config))
    tiny.randomise(model)
    model.tie_weights()
    return model


def write(folder: Path, name: str, generation: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write a directory as it was published: every tied tensor under each of its names, as pytorch_model.bin had it."""
    values = {**CONFIGS[name], **changes}
    model = build(values)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save(folder, as_published(name, model.state_dict()))
    return folder


def as_published(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name weights as the published file does."""
    tensors = dict(state)
    if name == "t5-small":  # as Google's files were converted
        used = tensors["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        tensors[UNUSED_BIAS] = torch.randn_like(used)
    if name == "bart-large-cnn":
        tensors |= {f"model.{side}.version": torch.tensor([2.0]) for side in ("encoder", "decoder")}
    if name == "bart-base":
        tensors = {key.removeprefix("model."): t for key, t in tensors.items() if key.startswith("model.")}
    if name.startswith(("opus-mt", "bart-large-cnn", "t5-small")):
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
        # transformers 5.3 to 5.23 scale its logits regardless of config.json; the published ones were trained without.
        model.config.tie_word_embeddings = config.get("tie_word_embeddings", True)
    return model


def opened(made: Path) -> tuple[Tokenizer, GenerationDefaults]:
    """Load the tokenizer and the generation defaults of an imported model."""
    path, target = made / "generation.json", made / "target_tokenizer.json"
    tokenizer = Tokenizer.load(
        made / "tokenizer.json",
        model_spec(load_model(made).config, "fp32"),
        target=target if target.exists() else None,
        text=TextConfig.from_dict(json.loads((made / "text.json").read_text())),
    )
    return tokenizer, GenerationDefaults.from_dict(json.loads(path.read_text()) if path.exists() else {})
