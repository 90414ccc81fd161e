"""Modules that no layout expresses export by their two methods alone: rotary positions, ALiBi, parallel sublayers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import tiny
from tfexport.contract import ModelSpec, TokenIds
from tfexport.decode.offline import decode
from tfexport.export.write import write_graphs
from tfexport.generation import DecodeConfig
from tfexport.nn.cache import Cache, ConcatCache, Cross, KeyValue, Source
from tfexport.nn.source import CrossCache, PaddedSource
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs

VOCAB, D, HEADS, LAYERS, LENGTH = 37, 32, 4, 2, 20
WIDTH = D // HEADS


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of columns of [rows, len, heads, d] by an angle that grows with the position (arXiv:2104.09864)."""
    angle = positions[:, :, None, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def slopes(positions: Tensor, keys: int) -> Tensor:
    """Penalise distance, each head with its own slope (arXiv:2108.12409)."""
    distance = positions[:, None, :, None] - torch.arange(keys)
    return -distance * 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]


def capped(scores: Tensor) -> Tensor:
    """Keep scores within ±2, as Gemma 2 does within ±50 (arXiv:2408.00118)."""
    return 2 * torch.tanh(scores / 2)


def by_hand(query: Tensor, new: KeyValue, bias: Tensor | None, cache: Any, layer: int) -> Tensor:
    """Attend in a way that `cache.attend` does not know, to what it keeps all the same; [rows, target_len, D]."""
    kept = cache.update(layer, new)
    scores = capped(query.transpose(1, 2) @ kept.key.mT / WIDTH**0.5 + bias)
    weights = torch.where(cache.mask, scores, -1e4).softmax(-1)
    return (weights @ kept.value).transpose(1, 2).flatten(2)


class Parallel(nn.Module):
    """A layer whose attention and network read the same norm and are added together."""

    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        if cross:
            self.cross_q, self.cross_kv, self.cross_out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH))

    def network(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Modern(nn.Module):
    """Rotary positions or ALiBi on both sides, the latter also with capped scores; no table, parallel sublayers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.source, self.target = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList(Parallel(cross=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Parallel(cross=True) for _ in range(LAYERS))
        self.out = nn.Linear(D, VOCAB)

    def own(self, layer: Parallel, y: Tensor, positions: Tensor) -> list[Tensor]:
        """Project to query, key and value, [rows, len, heads, d], and turn the first two."""
        query, key, value = map(layer.heads, layer.qkv(y).chunk(3, -1))
        turned = self.kind == "rotary"
        return [rotated(query, positions) if turned else query, rotated(key, positions) if turned else key, value]

    def bias(self, positions: Tensor, keys: int) -> Tensor | None:
        return slopes(positions, keys) if self.kind in ("alibi", "capped") else None

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        x = self.source(source_ids)
        positions = torch.arange(source_ids.shape[1])[None]
        bias = self.bias(positions, source_ids.shape[1])
        for i, layer in enumerate(self.encoder):
            y = layer.norm(x)
            parts = (part.flatten(0, 1) for part in self.own(layer, y, positions))
            found = source.attend(i, *parts, bias, scale=WIDTH**-0.5).unflatten(0, source_ids.shape)
            x = x + layer.out(found) + layer.network(y)
        return [
            KeyValue(*(layer.heads(part).transpose(1, 2) for part in layer.cross_kv(x).chunk(2, -1)))
            for layer in self.decoder
        ]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        x, positions = self.target(target_ids), cache.positions
        bias = self.bias(positions, cache.key_len)
        for i, layer in enumerate(self.decoder):
            y = layer.norm(x)
            query, key, value = self.own(layer, y, positions)
            if self.kind == "capped":
                found = by_hand(query, KeyValue(key.transpose(1, 2), value.transpose(1, 2)), bias, cache, i)
            else:
                parts = (part.flatten(0, 1) for part in (query, key, value))
                found = cache.attend(i, *parts, bias, scale=WIDTH**-0.5).unflatten(0, target_ids.shape)
            look = cross.attend(i, layer.heads(layer.cross_q(y)).flatten(0, 1), scale=WIDTH**-0.5)
            x = x + layer.out(found) + layer.cross_out(look.unflatten(0, target_ids.shape)) + layer.network(y)
        return self.out(x[:, -1])

    def whole(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """All positions at once, with the decoder's attention written out: independent of caches and of `attend`."""
        cross = self.encode(source_ids, PaddedSource(source_mask))
        x, positions = self.target(target_ids), torch.arange(target_ids.shape[1])[None]
        causal = torch.ones(target_ids.shape[1], target_ids.shape[1], dtype=torch.bool).tril()
        for layer, memory in zip(self.decoder, cross, strict=True):
            y = layer.norm(x)
            query, key, value = (part.transpose(1, 2) for part in self.own(layer, y, positions))
            scores = query @ key.mT / WIDTH**0.5
            bias = self.bias(positions, target_ids.shape[1])
            scores = scores if bias is None else scores + bias
            scores = capped(scores) if self.kind == "capped" else scores
            found = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value
            looked = (layer.heads(layer.cross_q(y)).transpose(1, 2) @ memory.key.mT / WIDTH**0.5).masked_fill(
                ~source_mask[:, None, None], -torch.inf
            ).softmax(-1) @ memory.value
            merged = [t.transpose(1, 2).flatten(2) for t in (found, looked)]
            x = x + layer.out(merged[0]) + layer.cross_out(merged[1]) + layer.network(y)
        return self.out(x)


SPEC = ModelSpec(
    d_model=D,
    source_vocab=VOCAB,
    max_source_length=LENGTH,
    tokens=TokenIds(pad=0, start=1, eos=2),
    precision="fp32",
    vocab=VOCAB,
    layers=LAYERS,
    heads=HEADS,
    head_dim=WIDTH,
    value_dim=WIDTH,
    max_target_length=LENGTH,
)


def made(kind: str) -> Modern:
    model = Modern(kind)
    tiny.randomise(model)
    return model.eval()


@pytest.fixture(scope="session", params=["rotary", pytest.param("alibi", marks=pytest.mark.slow), "capped"])
def exported(request: pytest.FixtureRequest, once: Callable[[str, Callable[[Path], object]], Path]) -> tuple[str, Path]:
    def make(path: Path) -> None:
        folder = path.with_name(f"{path.name}-unfinished")
        folder.mkdir(exist_ok=True)
        write_graphs(made(request.param), SPEC, folder, forms=("concat", "static"), opset=18, report=lambda _: None)
        folder.rename(path)

    return request.param, once(f"protocol-{request.param}", make)


def opened(path: Path, form: str) -> object:
    files = {"encoder": "encoder.onnx", "decoder": "decoder.onnx", "decoder_static": "decoder_static.onnx"}
    return OrtSession(Graphs({name: path / file for name, file in files.items()}, SPEC), form)


@pytest.mark.parametrize("form", ["concat", "static"])
def test_every_step_says_what_all_positions_at_once_say(form: str, exported: tuple[str, Path]) -> None:
    """Uneven sources with padding; a step of several tokens first, then one by one."""
    kind, path = exported
    source_ids, source_mask, target_ids = tiny.batch(vocab=VOCAB)
    with torch.inference_mode():
        expected = made(kind).whole(source_ids, source_mask, target_ids).numpy()
    session = opened(path, form)
    batch, worst, prompt_len = session.batch(), 0.0, 3
    batch.add(source_ids.numpy(), source_mask.numpy(), target_ids[:, :prompt_len].tolist())
    for position in range(prompt_len - 1, target_ids.shape[1]):
        found = batch.step(target_ids[:, position].numpy(), VOCAB)
        logits = np.take_along_axis(expected[:, position], found.token_ids, 1)
        worst = max(worst, float(np.abs(found.logits - logits).max()))
    assert worst < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("form", ["concat", "static"])
def test_greedy_texts_are_those_of_the_eager_module(form: str, exported: tuple[str, Path]) -> None:
    """Token by token, without any cache, and however the sources are batched."""
    kind, path = exported
    model = made(kind)
    sources = [[5, 6, 7, 8], [11, 12], [30, 3, 9, 10, 20, 21]]

    def eager(source: list[int]) -> tuple[int, ...]:
        ids, written = torch.tensor([source]), [1]
        with torch.inference_mode():
            while len(written) <= 9 and written[-1] != 2:
                logits = model.whole(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([written]))
                written.append(int(logits[0, -1].argmax()))
        return tuple(written[1:])

    config = DecodeConfig(max_new_tokens=9)
    expected = [eager(source) for source in sources]
    assert len(set(expected)) == len(sources)
    session = opened(path, form)
    assert [best[0].token_ids for best in decode(session, sources, config)] == expected
    assert [decode(session, [source], config)[0][0].token_ids for source in sources] == expected
    beams = DecodeConfig(num_beams=4, max_new_tokens=9)
    together = [best[0].token_ids for best in decode(session, sources, beams)]
    assert together == [decode(session, [source], beams)[0][0].token_ids for source in sources]


def test_positions_matter_and_cached_is_uncached() -> None:
    """The models are what their names say: without their positions the outputs change."""
    source_ids, source_mask, target_ids = tiny.batch(vocab=VOCAB)
    found = {}
    for kind in ("rotary", "alibi", "capped", "none"):
        model = made(kind).double()
        empty = torch.zeros(3, HEADS, 0, WIDTH, dtype=torch.float64)
        cache = ConcatCache([KeyValue(empty, empty)] * LAYERS, target_ids)
        with torch.inference_mode():
            found[kind] = model.whole(source_ids, source_mask, target_ids)
            cross = CrossCache(model.encode(source_ids, PaddedSource(source_mask)), source_mask)
            cached = model.decode_step(target_ids, cross, cache)
        assert (cached - found[kind][:, -1]).abs().max() < 1e-12
    assert (found["rotary"] - found["none"]).abs().max() > 0.1
    assert (found["alibi"] - found["none"]).abs().max() > 0.1
    assert (found["capped"] - found["alibi"]).abs().max() > 0.1
