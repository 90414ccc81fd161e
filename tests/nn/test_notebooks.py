"""Presets of notebooks, at small sizes, reproduce what the notebooks' own modules computed.

The recorded outputs lie outside the repository; without them these tests skip.
A record is a state dict and, from the original eager module in float64, inputs and logits.
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
    scaled = config.embedding_scale != 1
    return replace(
        config,
        d_model=d_model,
        source_vocab=vocab,
        target_vocab=state["dec.embed.weight"].shape[0],
        max_source_length=state["enc.pos"].shape[0],
        max_target_length=state["dec.pos"].shape[0],
        encoder=replace(config.encoder, **sizes),
        decoder=replace(config.decoder, **sizes),
        embedding_scale=math.sqrt(d_model) if scaled else 1.0,
    )


@pytest.mark.skipif(not RECORDS.is_dir(), reason="recorded outputs of the notebooks are not here")
@pytest.mark.parametrize(
    ("name", "record", "layout"),
    [("notebook-001", "hkproj_2023_05", "hkproj"), ("notebook-003", "lazyprogrammer", "lazyprogrammer")],
)
def test_equals_recorded_output(name: str, record: str, layout: str) -> None:
    """The layout gives the canonical names; the preset gives the switches."""
    reference = load_file(RECORDS / f"{record}.golden.safetensors")
    with safe_open(RECORDS / f"{record}.golden.safetensors", "pt") as file:
        notes = file.metadata()
    heads, named = int(notes["heads"]), builtin_layouts()[layout]
    tokens = {f"tokens.{token}": 0 for token in ("pad", "start", "eos") if token not in named.tokens}
    applied = apply_layout(named, load_file(RECORDS / f"{record}.safetensors"), heads=heads, settings=tokens)
    state = applied.model().state_dict()
    model = Transformer(shrunk(name, state, num_heads=heads)).double().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        output = model(reference["source_ids"], reference["source_keep"], reference["target_ids"])
    if notes["outputs"] == "log_probs":
        output = output.log_softmax(-1)
    expected, keep = reference["logits"], reference["target_keep"]
    assert (output - expected)[keep].abs().max() < TOLERANCE * expected[keep].abs().max()


@pytest.mark.skipif(not RECORDS.is_dir(), reason="recorded outputs of the notebooks are not here")
@pytest.mark.parametrize(("model", "record"), [(Notebook001, "hkproj_2023_05"), (Notebook003, "lazyprogrammer")])
def test_the_example_models_are_those_that_were_recorded(model: type[nn.Module], record: str) -> None:
    example = model().eval()
    example.load_state_dict(load_file(RECORDS / f"{record}.safetensors"))
    recorded = load_file(RECORDS / f"{record}.golden.safetensors")
    with torch.no_grad():
        output = example.double()(recorded["source_ids"], recorded["source_keep"], recorded["target_ids"])
    expected, keep = recorded["logits"], recorded["target_keep"]
    assert (output - expected)[keep].abs().max() < TOLERANCE * expected[keep].abs().max()


def test_norm_of_notebook_000() -> None:
    """It adds eps behind the division; as `std` with eps 0, the bias grows by gain · eps."""
    eps, x = 1e-5, torch.randn(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = preset("notebook-000")
    norm = LayerNorm(replace(tiny.config(), norm=config.norm, norm_eps=config.norm_eps)).double()
    tiny.randomise(norm)
    gain, bias = norm.weight.detach(), norm.bias.detach().clone()
    as_written = gain * ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + eps) + bias
    with torch.no_grad():
        norm.bias += gain * eps
        assert (norm(x) - as_written).abs().max() < 1e-14
