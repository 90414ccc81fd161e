"""A model directory in the forms of other systems: of Hugging Face Marian, and of CTranslate2.

Imported late, in the environment of each system and without tfexport: numpy counts as a part of their own start.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[np.float32]

SIDES = {"enc": "encoder", "dec": "decoder"}
# What all systems compute alike: the transformer of the paper with ReLU.
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
START, EOS = "<s>", "</s>"


@dataclass(frozen=True)
class Canonical:
    """A model as its directory describes it.

    Attributes:
        config: of `config.json`.
        arrays: of `model.safetensors`, float32; tied tables appear once.
    """

    config: dict[str, Any]
    arrays: dict[str, Array]

    @classmethod
    def read(cls, folder: Path, norm_place: str = "post") -> Canonical:
        """Read a model directory.

        Args:
            folder: of the model.
            norm_place: "post", as in the paper, or "pre", without norms at the end.

        Raises:
            ValueError: it is a model that the systems would not all compute alike; lists what differs.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wrong = [f"{name} {config[name]!r}" for name, value in EXPECTED.items() if config[name] != value]
        wrong += [f"embedding_scale {config['embedding_scale']}"] * (
            not math.isclose(config["embedding_scale"], math.sqrt(config["d_model"]))
        )
        wrong += [f"{side}: {stack}" for side in SIDES.values() if not is_plain(stack := config[side], norm_place)]
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

    def bias(self, name: str, size: int) -> Array:
        """Return a bias, zeros where the model has none."""
        return self.arrays.get(name, np.zeros(size, np.float32))


def is_plain(stack: dict[str, Any], norm_place: str) -> bool:
    """Say whether a stack normalises at each plain sum there and no more, with heads as wide as d_model gives."""
    widths, has_plain_sums = (stack["d_k"], stack["d_v"]), stack.get("residual_scale", 1.0) == 1.0
    return stack["norm_place"] == norm_place and not stack["final_norm"] and widths == (None, None) and has_plain_sums


def write_marian(folder: Path, target: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors: the same function, columns in another order.

    Marian's position table holds the sines in the first half and the cosines in the second, the paper's alternates
    them. A transformer computes the same when the columns of everything on the residual stream change places
    together, so they do, and Marian's own table fits.

    Args:
        folder: model directory.
        target: directory to make.
    """
    model = Canonical.read(folder)
    arrays = _marian_tables(model)
    for side, name in SIDES.items():
        for index in range(model.layers(side)):
            layer = _marian_layer(model, f"{side}.layers.{index}", NORMS[side])
            arrays |= {f"model.{name}.layers.{index}.{key}": array for key, array in layer.items()}
    target.mkdir()
    save_file(
        {key: np.ascontiguousarray(array) for key, array in arrays.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    for file, values in (("config.json", _marian_config(model)), ("generation_config.json", _marian_generation(model))):
        (target / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def order(d_model: int) -> np.ndarray:
    """Return the paper's column for each of Marian's: all sines, then all cosines."""
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])


def _marian_tables(model: Canonical) -> dict[str, Array]:
    columns = order(model.config["d_model"])
    arrays = {"final_logits_bias": model.bias("out.bias", model.config["target_vocab"])[None]}
    if model.config["tie_embeddings"]:
        arrays["model.shared.weight"] = model.table("enc")[:, columns]
    else:
        arrays |= {f"model.{name}.embed_tokens.weight": model.table(side)[:, columns] for side, name in SIDES.items()}
    if not model.config["tie_output"]:
        arrays["lm_head.weight"] = model.output()[:, columns]
    return arrays


def _marian_layer(model: Canonical, prefix: str, norms: dict[str, str]) -> dict[str, Array]:
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


def _marian_config(model: Canonical) -> dict[str, object]:
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


def _marian_generation(model: Canonical) -> dict[str, object]:
    tokens = model.config["tokens"]
    return {
        "pad_token_id": tokens["pad"],
        "eos_token_id": tokens["eos"],
        "decoder_start_token_id": tokens["start"],
    }


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
        no_final_norm=True,
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
