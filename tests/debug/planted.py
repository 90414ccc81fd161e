"""Models whose float32 results are ordinary and whose float16 overflows."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import tiny
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.precision import Precision

FC1, FC2 = "model.enc.layers.1.ffn.fc1", "model.enc.layers.1.ffn.fc2"
PRE = {"norm_place": "pre", "final_norm": True}


def planted(name: str) -> Transformer:
    """Return a model whose float16 has an overflow.

    inner: between two products. residual: in the sum of all layers, as in T5. outputs: in keys of cross-attention.
    """
    model = tiny.model(
        tiny.config(**({"encoder": PRE, "decoder": PRE} if name == "residual" else {})), dtype=torch.float32
    )
    state = model.state_dict()
    with torch.no_grad():
        if name == "inner":
            state["enc.layers.1.ffn.fc1.weight"] *= 2e4
            state["enc.layers.1.ffn.fc1.bias"] *= 2e4
            state["enc.layers.1.ffn.fc2.weight"] /= 2e4
        elif name == "residual":
            state["enc.layers.0.ffn.fc2.weight"] *= 6e4
        elif name == "outputs":
            state["dec.layers.0.cross.k.weight"] *= 4e4
    return model


def exported(path: Path, name: str, precision: Precision = "fp16") -> Path:
    save_model(planted(name), path / "model")
    config = ExportConfig(precision=precision, variants=("static",))
    return export_bundle(str(path / "model"), path / "bundle", config, verify=False).path
