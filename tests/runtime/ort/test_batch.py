"""Rows that join and leave in ONNX Runtime: each returns the same as in a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests import tiny
from tests.runtime.exported import LONG, Once, exported, ort_session, sources
from tfexport.contract import REORDER, TokenIds
from tfexport.errors import BundleError
from tfexport.nn.transformer import Transformer
from tfexport.runtime.ort._cache import FIRST_CAPACITY, RowBuffers, _DeviceBuffers, _HostBuffers
from tfexport.runtime.ort._static import StaticBatch
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Batch, Candidates, Ids, close_up
from tfexport.runtime.sources import pad_right

ATOL = 2e-5
Sessions = Callable[[Transformer], tuple[OrtSession, ...]]
STATIC = {"host": True, "device": False}
VARIANTS = ("post", "t5", pytest.param("mixed", marks=pytest.mark.slow))


@pytest.fixture(params=STATIC)
def static(request: pytest.FixtureRequest, once: Once) -> Sessions:
    """Open a model, and again with the caches elsewhere, to decode each text alone."""
    here = STATIC[request.param]
    return lambda model: tuple(ort_session(model, "static", once, host_caches=host) for host in (here, not here))


@dataclass
class Text:
    """One source with what its rows read after the prompt, [steps, width], and whom they continue after each step."""

    source: list[int]
    prompt: list[int]
    tokens: Ids
    orders: Ids
    steps: list[Candidates] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.steps) == len(self.tokens)


def draw(rng: np.random.Generator, width: int, longest: int) -> Text:
    steps, prompt = int(rng.integers(1, longest)), int(rng.choice([1, 1, 2, 5]))
    tokens = rng.integers(0, tiny.VOCAB, (steps, width))
    source, read = rng.integers(2, tiny.VOCAB, rng.integers(1, 24)), rng.integers(0, tiny.VOCAB, prompt)
    return Text(source.tolist(), read.tolist(), tokens, rng.integers(0, width, (steps, width)))


def advance(batch: Batch, texts: list[Text]) -> None:
    """Take one step with all texts of a batch and let their rows branch."""
    width, at = batch.width, [len(text.steps) for text in texts]
    found = batch.step(np.concatenate([text.tokens[place] for text, place in zip(texts, at, strict=True)]), 3)
    for number, text in enumerate(texts):
        rows = np.s_[number * width : (number + 1) * width]
        text.steps.append(Candidates(found.token_ids[rows], found.logits[rows], found.log_normalizer[rows]))
    orders = [text.orders[place] + number * width for number, (text, place) in enumerate(zip(texts, at, strict=True))]
    batch.reorder(np.concatenate(orders))


def join(batch: Batch, texts: list[Text]) -> None:
    batch.add(tiny.sources(*pad_right([text.source for text in texts], 0)), [text.prompt for text in texts])


def alone(session: OrtSession, text: Text, width: int) -> list[Candidates]:
    batch, copy = session.batch(width), Text(text.source, text.prompt, text.tokens, text.orders)
    join(batch, [copy])
    while not copy.is_done:
        advance(batch, [copy])
    return copy.steps


def assert_as_alone(session: OrtSession, texts: list[Text], width: int) -> None:
    for text in texts:
        for found, expected in zip(text.steps, alone(session, text, width), strict=True):
            assert_equal(found, expected)


def assert_equal(found: Candidates, expected: Candidates) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.logits, expected.logits, atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.log_normalizer, expected.log_normalizer, atol=ATOL, rtol=0)


def poison(buffers: RowBuffers, live: int) -> None:
    """Leave NaN in all rows that nobody uses, as somebody may have before."""
    if isinstance(buffers, _HostBuffers):
        for array in buffers._arrays:
            array[live:] = np.nan
        return
    assert isinstance(buffers, _DeviceBuffers)
    memory = buffers._memory.numpy().view(np.float32)
    for units in buffers._units(buffers.length)[0]:
        width = buffers.length * buffers._divisor
        memory[: memory.size // width * width].reshape(-1, width)[units[live:]] = np.nan


def run(
    batch: StaticBatch, waiting: list[Text], rng: np.random.Generator, room: int, *, leave_early: bool = False
) -> list[Text]:
    """Decode texts that join over rows full of NaN, until they are done or leave early; return the latter."""
    texts: list[Text] = []
    left: list[Text] = []
    while waiting or texts:
        joining = min(len(waiting), room - len(texts), int(rng.integers(0, 4)) + (not texts))
        if joining:
            poison(batch._caches, batch.lengths.size)
            poison(batch._cross, len(texts))
            new, waiting = waiting[:joining], waiting[joining:]
            join(batch, new)
            texts += new
        lengths = [len(text.prompt) - 1 + len(text.steps) for text in texts]
        assert batch.lengths.tolist() == np.repeat(lengths, batch.width).tolist()
        advance(batch, texts)
        leaving = [n for n, text in enumerate(texts) if text.is_done or (leave_early and rng.random() < 0.05)]
        if leaving:
            gone = np.array(rng.permutation(leaving))
            left += [texts[n] for n in gone if not texts[n].is_done]
            batch.remove(gone)
            texts = [texts[n] for n in close_up(len(texts), gone)]
    return left


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_rows_that_join_and_leave_equal_rows_alone(static: Sessions, name: str, width: int, seed: int) -> None:
    rng, (session, other) = np.random.default_rng(seed), static(tiny.model(tiny.VARIANTS[name], dtype=torch.float32))
    texts = [draw(rng, width, 19) for _ in range(24)]
    batch = session.batch(width)
    assert isinstance(batch, StaticBatch)
    assert batch.can_join
    left = run(batch, texts, rng, room=6, leave_early=True)
    assert left
    assert batch.lengths.size == 0
    for text in left:
        text.tokens, text.orders = text.tokens[: len(text.steps)], text.orders[: len(text.steps)]
    assert_as_alone(other, texts, width)


def test_buffers_grow_and_shrink_with_their_contents(static: Sessions) -> None:
    rng, (session, other) = np.random.default_rng(1), static(tiny.model(LONG, dtype=torch.float32))
    texts = [draw(rng, 2, most) for most in (190, 9, 9, 9, 190, 70, 9, 9, 9, 9, 9, 9)]
    texts[0].tokens, texts[0].orders = (np.resize(array, (185, 2)) for array in (texts[0].tokens, texts[0].orders))
    texts[0].source, texts[3].source = [5] * 2, [6] * 24
    batch = session.batch(2)
    assert isinstance(batch, StaticBatch)
    run(batch, texts, rng, room=3)
    assert_as_alone(other, texts, 2)
    late = [draw(rng, 2, 9) for _ in range(9)]
    run(batch, late, rng, room=9)
    assert batch._caches.length == FIRST_CAPACITY
    assert_as_alone(other, late, 2)


def test_prompts_need_no_pad_token_in_the_target_vocabulary(static: Sessions) -> None:
    tokens = TokenIds(pad=tiny.VOCAB + 8, start=1, eos=2)
    session, other = static(tiny.model(tiny.config(source_vocab=tiny.VOCAB + 9, tokens=tokens), dtype=torch.float32))
    read = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 1))
    texts = [Text(source, prompt, read, np.zeros_like(read)) for source, prompt in (([5, 6], [1]), ([7], [1, 5, 6]))]
    batch = session.batch()
    join(batch, texts)
    for _ in read:
        advance(batch, texts)
    assert_as_alone(other, texts, 1)


def test_an_older_bundle_runs_on_the_cpu_and_is_refused_on_a_gpu(once: Once) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    graphs, spec = exported(model, once)
    before = {name: path for name, path in graphs.items() if name != REORDER}
    assert len(before) == len(graphs) - 1
    for variant in ("concat", "static"):
        batch = OrtSession(Graphs(before, spec), variant, threads=1).batch(2)
        batch.add(tiny.sources(*sources(model.config)), [[1]] * 4)
        batch.reorder(np.array([1, 0, 2, 2, 4, 5, 7, 6]))
        assert batch.step(np.zeros(8, np.int64), 1).token_ids.shape == (8, 1)
        with pytest.raises(BundleError, match=r"no graph reorder.*tfexport onnx SOURCE --output BUNDLE --force"):
            OrtSession(Graphs(before, spec), variant, threads=1, host_caches=False)
