"""A model directory read without tfexport: its configuration and its arrays under canonical names."""

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
# What all systems compute alike: the post-norm transformer of the paper with ReLU.
EXPECTED = {
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "relu",
    "feed_forward": "mlp",
    "relative_bias": "none",
    "residual_scale": 1.0,
    "positions": "table",
    "embedding_norm": False,
    "attention_scale": None,
    "logit_scale": 1.0,
}


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
    def read(cls, folder: Path) -> Canonical:
        """Read a model directory.

        Raises:
            ValueError: it is a model that the systems would not all compute alike; lists what differs.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wrong = [f"{name} {config[name]!r}" for name, value in EXPECTED.items() if config[name] != value]
        wrong += [f"embedding_scale {config['embedding_scale']}"] * (
            not math.isclose(config["embedding_scale"], math.sqrt(config["d_model"]))
        )
        wrong += [f"{side}: {stack}" for side in SIDES.values() if not is_post_norm(stack := config[side])]
        if wrong:
            raise ValueError(f"{folder}: {', '.join(wrong)}; expected the post-norm transformer of the paper")
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


def is_post_norm(stack: dict[str, Any]) -> bool:
    """Say whether a stack normalises after each sum and no more, with heads as wide as d_model gives."""
    return stack["norm_place"] == "post" and not stack["final_norm"] and stack["d_k"] is None and stack["d_v"] is None
