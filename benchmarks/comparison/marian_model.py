"""A model directory as a Hugging Face Marian model: the same function, with its columns in another order.

Marian's position table holds the sines in the first half and the cosines in the
second, the paper's alternates them. A transformer computes the same when the
columns of everything on the residual stream change places together, so they do,
and Marian's own table fits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from comparison.canonical import SIDES, Array, Canonical

# Marian's names of what a layer has; what is written to the residual stream has its rows in the new order, what reads
# it its columns.
WRITERS = {"self.o": "self_attn.out_proj", "cross.o": "encoder_attn.out_proj", "ffn.fc2": "fc2"}
READERS = {
    **{f"self.{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"cross.{name}": f"encoder_attn.{name}_proj" for name in "qkv"},
    "ffn.fc1": "fc1",
}
NORMS = {
    "enc": {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "dec": {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


def write_marian(folder: Path, target: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    Args:
        folder: model directory.
        target: directory to make.
    """
    model = Canonical.read(folder)
    arrays = _tables(model)
    for side, name in SIDES.items():
        for index in range(model.layers(side)):
            layer = _layer(model, f"{side}.layers.{index}", NORMS[side])
            arrays |= {f"model.{name}.layers.{index}.{key}": array for key, array in layer.items()}
    target.mkdir()
    save_file(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    for file, values in (("config.json", _config(model)), ("generation_config.json", _generation(model))):
        (target / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def order(d_model: int) -> np.ndarray:
    """Return the paper's column for each of Marian's: all sines, then all cosines."""
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])


def _tables(model: Canonical) -> dict[str, Array]:
    columns = order(model.config["d_model"])
    arrays = {"final_logits_bias": model.bias("out.bias", model.config["target_vocab"])[None]}
    if model.config["tie_embeddings"]:
        arrays["model.shared.weight"] = model.table("enc")[:, columns]
    else:
        arrays |= {f"model.{name}.embed_tokens.weight": model.table(side)[:, columns] for side, name in SIDES.items()}
    if not model.config["tie_output"]:
        arrays["lm_head.weight"] = model.output()[:, columns]
    return arrays


def _layer(model: Canonical, prefix: str, norms: dict[str, str]) -> dict[str, Array]:
    columns, found = order(model.config["d_model"]), {}
    for ours, theirs in {**READERS, **WRITERS}.items():
        if f"{prefix}.{ours}.weight" in model.arrays:
            weight = model.arrays[f"{prefix}.{ours}.weight"]
            bias = model.bias(f"{prefix}.{ours}.bias", len(weight))
            writes = ours in WRITERS
            found[f"{theirs}.weight"] = weight[columns] if writes else weight[:, columns]
            found[f"{theirs}.bias"] = bias[columns] if writes else bias
    for ours, theirs in norms.items():
        for part in ("weight", "bias"):
            found[f"{theirs}.{part}"] = model.arrays[f"{prefix}.{ours}.{part}"][columns]
    return found


def _config(model: Canonical) -> dict[str, object]:
    ours, tokens = model.config, model.config["tokens"]
    stacks = {
        f"{name}_{theirs}": ours[name][key]
        for name in SIDES.values()
        for key, theirs in (("layers", "layers"), ("num_heads", "attention_heads"), ("d_ff", "ffn_dim"))
    }
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "dtype": "float32",
        "d_model": ours["d_model"],
        "vocab_size": ours["source_vocab"],
        "decoder_vocab_size": ours["target_vocab"],
        "max_position_embeddings": max(ours["max_source_length"], ours["max_target_length"]),
        **stacks,
        "activation_function": "relu",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": ours["tie_embeddings"],
        "tie_word_embeddings": ours["tie_output"],
        "pad_token_id": tokens["pad"],
        "eos_token_id": tokens["eos"],
        "decoder_start_token_id": tokens["start"],
        "forced_eos_token_id": None,
    }


def _generation(model: Canonical) -> dict[str, object]:
    tokens = model.config["tokens"]
    return {
        "pad_token_id": tokens["pad"],
        "eos_token_id": tokens["eos"],
        "decoder_start_token_id": tokens["start"],
    }
