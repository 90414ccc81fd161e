"""Convert a model directory to CTranslate2, in that environment and without tfexport."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]

SIDES = {"enc": "encoder", "dec": "decoder"}
# The transformer of the paper with ReLU, which both systems compute alike.
EXPECTED = {
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "relu",
    "feed_forward": "mlp",
    "relative_bias": "none",
    "positions": "table",
    "embedding_norm": False,
    "attention_scale": None,
    "logit_scale": 1.0,
}
START, EOS = "<s>", "</s>"


@dataclass(frozen=True)
class Canonical:
    """The contents of a model directory; tied tables appear once."""

    config: dict[str, Any]
    arrays: dict[str, Array]

    @classmethod
    def read(cls, folder: Path, norm_place: str = "post") -> Canonical:
        """Read a model directory.

        Args:
            folder: of the model.
            norm_place: "post", as in the paper, or "pre".

        Raises:
            ValueError: CTranslate2 would compute the model differently; lists the differences.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wrong = [f"{name} {config[name]!r}" for name, value in EXPECTED.items() if config[name] != value]
        wrong += [f"embedding_scale {config['embedding_scale']}"] * (
            not math.isclose(config["embedding_scale"], math.sqrt(config["d_model"]))
        )
        wrong += [f"{side}: {stack}" for side in SIDES.values() if not is_plain(stack := config[side], norm_place)]
        wrong += ["final_norm of one side"] * (config["encoder"]["final_norm"] != config["decoder"]["final_norm"])
        if wrong:
            raise ValueError(f"{folder}: {', '.join(wrong)}; expected the {norm_place}-norm transformer of the paper")
        return cls(config, load_file(folder / "model.safetensors"))

    def layers(self, side: str) -> int:
        """Return the number of layers of "enc" or "dec"."""
        return int(self.config[SIDES[side]]["layers"])

    def table(self, side: str) -> Array:
        """Return the embedding table of "enc" or "dec", [vocab, d_model]."""
        return self.arrays["enc.embed.weight" if self.config["tie_embeddings"] else f"{side}.embed.weight"]

    def output(self) -> Array:
        """Return the output projection, [vocab, d_model]."""
        return self.table("dec") if self.config["tie_output"] else self.arrays["out.weight"]


def is_plain(stack: dict[str, Any], norm_place: str) -> bool:
    """Return whether a stack has norms only in that place, plain sums, and heads of the default width."""
    widths, has_plain_sums = (stack["d_k"], stack["d_v"]), stack.get("residual_scale", 1.0) == 1.0
    has_norms = stack["norm_place"] == norm_place and not (stack["final_norm"] and norm_place == "post")
    return has_norms and widths == (None, None) and has_plain_sums


def write_ctranslate2(folder: Path, target: Path, quantization: str | None) -> None:
    """Write a CTranslate2 model whose tokens are its ids in decimal.

    Args:
        folder: model directory.
        target: directory to make.
        quantization: of CTranslate2, such as "int8"; None for float32.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    norm_place = json.loads((folder / "config.json").read_text(encoding="utf-8"))["encoder"]["norm_place"]
    model = Canonical.read(folder, norm_place)
    spec = transformer_spec.TransformerSpec.from_config(
        (model.layers("enc"), model.layers("dec")),
        model.config["encoder"]["num_heads"],
        pre_norm=norm_place == "pre",
        no_final_norm=not model.config["encoder"]["final_norm"],
        activation=common_spec.Activation.RELU,
    )
    for side, part in (("enc", spec.encoder), ("dec", spec.decoder)):
        _fill_stack(part, model, side)
        if model.config[SIDES[side]]["final_norm"]:
            _fill_norm(part.layer_norm, model.arrays, f"{side}.norm")
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
    """Fill a linear layer with several, stacked."""
    spec.weight = np.concatenate([arrays[f"{name}.weight"] for name in names])
    if f"{names[0]}.bias" in arrays:
        spec.bias = np.concatenate([arrays[f"{name}.bias"] for name in names])


def _fill_norm(spec: Any, arrays: dict[str, Array], name: str) -> None:
    spec.gamma, spec.beta = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
