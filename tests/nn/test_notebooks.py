"""Presets of notebooks, at small sizes, reproduce the outputs of the notebooks' own modules.

The recorded outputs are outside the repository; without them these tests skip. A record is a state dict and, from the
original eager module in float64, inputs and logits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from models.from_scratch.notebook_001 import Notebook001
from models.from_scratch.notebook_003 import Notebook003
from tests import tiny
from tfexport.importing.layout.apply import apply_layout
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.nn.config import TransformerConfig
from tfexport.nn.layers import LayerNorm
from tfexport.nn.presets import preset
from tfexport.nn.transformer import Transformer

RECORDS = Path(__file__).resolve().parents[3] / "shared" / "goldens"

# Relative to the largest logit; float64 on both sides, measured 2e-15.
TOLERANCE = 1e-12


def shrunk(name: str, state: dict[str, Tensor], *, num_heads: int) -> TransformerConfig:
    """Return the preset with the sizes of a canonical state dict and all its switches kept."""
    config = preset(name)
    assert config.decoder is not None
    vocab, d_model = state["enc.embed.weight"].shape
    sizes = {
        "layers": 2,
        "num_heads": num_heads,
        "d_ff": state["enc.layers.0.ffn.fc1.weight"].shape[0],
        "d_k": state["enc.layers.0.self.k.weight"].shape[0] // num_heads,
        "d_v": state["enc.layers.0.self.v.weight"].shape[0] // num_heads,
    }
    return replace(
        config,
        d_model=d_model,
        source_vocab=vocab,
        target_vocab=state["dec.embed.weight"].shape[0],
        max_source_length=state["enc.pos"].shape[0],
        max_target_length=state["dec.pos"].shape[0],
        encoder=replace(config.encoder, **sizes),
        decoder=replace(config.decoder, **sizes),
        embedding_scale=1.0 if config.embedding_scale == 1 else math.sqrt(d_model),
    )


@pytest.mark.skipif(not RECORDS.is_dir(), reason="recorded outputs of the notebooks are not here")
@pytest.mark.parametrize(
    ("example", "name", "record", "layout"),
    [
        (Notebook001, "notebook-001", "hkproj_2023_05", "hkproj"),
        (Notebook003, "notebook-003", "lazyprogrammer", "lazyprogrammer"),
    ],
)
def test_equals_recorded_output(example: type[nn.Module], name: str, record: str, layout: str) -> None:
    """The example model and the preset; the layout gives the canonical names, the preset gives the switches."""
    reference, tensors = (
        load_file(RECORDS / f"{record}.golden.safetensors"),
        load_file(RECORDS / f"{record}.safetensors"),
    )
    with safe_open(RECORDS / f"{record}.golden.safetensors", "pt") as file:
        notes = file.metadata()
    heads, names = int(notes["heads"]), builtin_layouts()[layout]
    tokens = {f"tokens.{token}": 0 for token in ("pad", "start", "eos") if token not in names.tokens}
    state = apply_layout(names, tensors, heads=heads, settings=tokens).model().state_dict()
    expected, keep = reference["logits"], reference["target_keep"]
    for model, parameters in (
        (example(), tensors),
        (Transformer(shrunk(name, state, num_heads=heads)).double(), state),
    ):
        model.eval().load_state_dict(parameters)
        with torch.no_grad():
            output = model.double()(reference["source_ids"], reference["source_keep"], reference["target_ids"])
        if notes["outputs"] == "log_probs" and isinstance(model, Transformer):
            output = output.log_softmax(-1)
        assert (output - expected)[keep].abs().max() < TOLERANCE * expected[keep].abs().max()


def test_norm_of_notebook_000() -> None:
    """It adds eps after the division; as `std` with eps 0, the bias grows by gain · eps."""
    eps, x = 1e-5, torch.randn(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = preset("notebook-000")
    norm = LayerNorm(replace(tiny.config(), norm=config.norm, norm_eps=config.norm_eps), "encoder").double()
    tiny.randomise(norm)
    gain, bias = norm.weight.detach(), norm.bias.detach().clone()
    as_written = gain * ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + eps) + bias
    with torch.no_grad():
        norm.bias += gain * eps
        assert (norm(x) - as_written).abs().max() < 1e-14
