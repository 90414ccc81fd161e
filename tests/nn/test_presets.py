"""Presets: known names, the same bytes every time, and weights that make parity mean something."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from tfexport.errors import ConfigError
from tfexport.nn.cache import Cross, Source
from tfexport.nn.config import model_spec
from tfexport.nn.presets import build_preset, preset
from tfexport.nn.source import encoder_inputs, position_mask
from tfexport.nn.transformer import Transformer
from tfexport.runtime.sources import pad_sources, random_source

# Built in a moment; the others have the same code path and half a gigabyte of weights.
SMALL = ("tiny", "notebook-003", "speech-whisper", "speech-s2t", "captioner")


def digest(model: Transformer) -> str:
    sums = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sums.update(name.encode() + parameter.detach().numpy().tobytes())
    return sums.hexdigest()


def test_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        build_preset("paper-bse")
    assert str(caught.value) == (
        "preset 'paper-bse' is unknown, expected one of paper-base, paper-big, modern, student-base, student-memory, "
        "student-tiny, student-tiny-ssru, tiny, notebook-000, notebook-001, notebook-002, notebook-003, notebook-004, "
        "speech-whisper, speech-s2t, captioner"
    )


@pytest.mark.parametrize(("name", "parameters"), [("paper-base", 65e6), ("paper-big", 213e6), ("modern", 65e6)])
def test_the_papers_sizes(name: str, parameters: float) -> None:
    """Table 3 gives 65 and 213 million parameters, with about 37,000 tokens instead of 32,000."""
    config = preset(name)
    with torch.device("meta"):
        trained = sum(p.numel() for p in Transformer(config).parameters() if p.requires_grad)
    in_the_paper = trained + 5_000 * config.d_model
    assert in_the_paper == pytest.approx(parameters, rel=0.04)


@pytest.mark.parametrize("name", SMALL)
def test_same_seed_gives_same_bytes(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_preset(name)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert digest(first) == digest(build_preset(name)) != digest(build_preset(name, seed=1))


def test_bytes_of_tiny_stay() -> None:
    """A figure measured on a preset is comparable only while its weights are the same."""
    model = build_preset("tiny")
    table = model.enc.embed.weight.detach().numpy().tobytes()
    assert hashlib.sha256(table).hexdigest()[:16] == "7ed2f0182406485e"


@pytest.mark.parametrize("name", SMALL)
def test_no_parameter_is_trivial(name: str) -> None:
    model = build_preset(name)
    assert not model.training
    for parameter_name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all(), parameter_name
        assert parameter.std() > 0.01, parameter_name


@torch.no_grad()
@pytest.mark.parametrize("name", [*SMALL, "modern", "student-tiny", "student-tiny-ssru"])
def test_greedy_decoding_is_not_degenerate(name: str) -> None:
    """Logits are spread, and what is decoded depends on the source and on the past."""
    model = build_preset(name)
    kind, rng = model_spec(model.config, "fp32").source, np.random.default_rng(0)
    sources = pad_sources(kind, [random_source(kind, rng, length) for length in (10, 7, 4, 1)])
    x, mask = encoder_inputs(kind, [torch.from_numpy(array) for array in sources.inputs.values()])
    cross = Cross(model.encode(x, Source(mask)), position_mask(kind, mask))
    ids = torch.full((4, 1), model.config.tokens.start)
    cache, decoded = model.empty_cache(ids), []
    for _ in range(16):
        logits = model.decode_step(ids, cross, cache)
        assert logits.isfinite().all()
        assert 1 < logits.std(-1).min() < 10
        ids = logits.argmax(-1, keepdim=True)
        cache = cache.following(ids)
        decoded.append(ids)
    rows = torch.cat(decoded, 1).tolist()
    assert len({tuple(row) for row in rows}) == 4
    assert all(len(set(row)) > 5 for row in rows)


@torch.no_grad()
def test_encoder_only() -> None:
    model = build_preset("notebook-002")
    assert model.config.decoder is None
    hidden = model.hidden_states(torch.tensor([[5, 6, 7]]), torch.ones(1, 3).bool())
    assert hidden.shape == (1, 3, 512)
    assert hidden.isfinite().all()
    assert hidden.std() > 0.5
