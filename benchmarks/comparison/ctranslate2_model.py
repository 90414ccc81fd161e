"""A model directory as a CTranslate2 model, through CTranslate2's own specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from comparison.canonical import SIDES, Array, Canonical

START, EOS = "<s>", "</s>"


def write_ctranslate2(folder: Path, target: Path, quantization: str | None) -> None:
    """Write a CTranslate2 model whose tokens are its ids in decimal.

    Args:
        folder: model directory.
        target: directory to make.
        quantization: of CTranslate2, such as "int8"; None for float32.
    """
    model = Canonical.read(folder)
    spec = transformer_spec.TransformerSpec.from_config(
        (model.layers("enc"), model.layers("dec")),
        model.config["encoder"]["num_heads"],
        pre_norm=False,
        activation=common_spec.Activation.RELU,
    )
    for side, part in (("enc", spec.encoder), ("dec", spec.decoder)):
        _fill_stack(part, model, side)
    projection = spec.decoder.projection
    projection.weight = model.output()
    if "out.bias" in model.arrays:
        projection.bias = model.arrays["out.bias"]
    ids, size = model.config["tokens"], model.config["source_vocab"]
    special = {ids["start"]: START, ids["eos"]: EOS}
    tokens = [special.get(token, str(token)) for token in range(size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.decoder_start_token = START
    spec.config.unk_token = str(ids["unk"])
    spec.validate()
    spec.optimize(quantization=quantization)
    target.mkdir()
    spec.save(str(target))


def _fill_stack(part: Any, model: Canonical, side: str) -> None:
    embeddings = part.embeddings
    (embeddings[0] if isinstance(embeddings, list) else embeddings).weight = model.table(side)
    part.position_encodings.encodings = model.arrays[f"{side}.pos"]
    for index, layer in enumerate(part.layer):
        prefix = f"{side}.layers.{index}"
        _fill_linear(layer.self_attention.linear[0], model.arrays, *(f"{prefix}.self.{name}" for name in "qkv"))
        _fill_linear(layer.self_attention.linear[1], model.arrays, f"{prefix}.self.o")
        _fill_norm(layer.self_attention.layer_norm, model.arrays, f"{prefix}.norm1")
        if SIDES[side] == "decoder":
            _fill_linear(layer.attention.linear[0], model.arrays, f"{prefix}.cross.q")
            _fill_linear(layer.attention.linear[1], model.arrays, *(f"{prefix}.cross.{name}" for name in "kv"))
            _fill_linear(layer.attention.linear[2], model.arrays, f"{prefix}.cross.o")
            _fill_norm(layer.attention.layer_norm, model.arrays, f"{prefix}.norm2")
        _fill_linear(layer.ffn.linear_0, model.arrays, f"{prefix}.ffn.fc1")
        _fill_linear(layer.ffn.linear_1, model.arrays, f"{prefix}.ffn.fc2")
        _fill_norm(layer.ffn.layer_norm, model.arrays, f"{prefix}.norm{3 if SIDES[side] == 'decoder' else 2}")


def _fill_linear(spec: Any, arrays: dict[str, Array], *names: str) -> None:
    """Fill one linear map with several, stacked."""
    spec.weight = np.concatenate([arrays[f"{name}.weight"] for name in names])
    if f"{names[0]}.bias" in arrays:
        spec.bias = np.concatenate([arrays[f"{name}.bias"] for name in names])


def _fill_norm(spec: Any, arrays: dict[str, Array], name: str) -> None:
    spec.gamma, spec.beta = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
