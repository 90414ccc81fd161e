"""Every backend, compared with the full forward pass of the model in PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.runtime.compiled import native_session
from tests.runtime.exported import Once, exported, ort_session, ranked, sources, wide, with_logits
from tests.runtime.joining import alone, differing, joining, random_requests
from tests.runtime.toy import ToySession
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import trt_session
from tfexport.contract import DECODER, Variant
from tfexport.decode.offline import decode
from tfexport.decode.score import score
from tfexport.errors import BackendError, InputError
from tfexport.export.decoders.contrib import CONTRIB
from tfexport.generation import DecodeConfig
from tfexport.nn.config import TransformerConfig
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import (
    Batch,
    Candidates,
    GreedySteps,
    Ids,
    Mask,
    MultiStep,
    ScoresTokens,
    Session,
    close_up,
)

MakeSession = Callable[[Transformer], Session]


def contrib_session(model: Transformer, once: Once) -> Session:
    graphs, spec = exported(model, once)
    if spec.has_decoder and DECODER["contrib"] not in graphs:
        pytest.skip(f"no contrib variant: {' and '.join(CONTRIB.supports(model.config, 'fp32'))}")
    return OrtSession(Graphs(graphs, spec), "contrib" if spec.has_decoder else None, threads=1)


def engine_session(model: Transformer, variant: Variant, once: Once, *, prompt: bool = False) -> Session:
    graphs, spec = exported(model, once)
    return trt_session(graphs, spec, variant if spec.has_decoder else None, cuda=CudaDouble(prompt=prompt))


# A new backend is one line here.
BACKENDS: dict[str, Callable[[Transformer, Once], Session]] = {
    "eager": lambda model, once: EagerSession(model),
    "ort concat": lambda model, once: ort_session(model, "concat", once),
    "ort static": lambda model, once: ort_session(model, "static", once),
    # As on a GPU: no buffer is shared with NumPy, a graph moves caches.
    "ort static device": lambda model, once: ort_session(model, "static", once, host_caches=False),
    "ort contrib": contrib_session,
    "native": native_session,
    "toy": lambda model, once: ToySession(*exported(model, once)),
    # The session of TensorRT, on doubles of engines and of CUDA, which runs work late or at once.
    "trt concat": lambda model, once: engine_session(model, "concat", once),
    "trt static": lambda model, once: engine_session(model, "static", once),
    "trt static prompt": lambda model, once: engine_session(model, "static", once, prompt=True),
}
ATOL = 2e-5
CONFIGS = {**tiny.VARIANTS, "limits differ": wide()}


@pytest.fixture(params=BACKENDS, scope="module")
def make_session(request: pytest.FixtureRequest, once: Once) -> MakeSession:
    return lambda model: BACKENDS[request.param](model, once)


@pytest.fixture(params=[*tiny.VARIANT_NAMES, "limits differ"], scope="module")
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.model(CONFIGS[request.param], dtype=torch.float32)


@pytest.fixture(scope="module")
def session(make_session: MakeSession, model: Transformer) -> Session:
    return make_session(model)


@pytest.fixture(scope="module")
def one(make_session: MakeSession) -> tuple[Session, Transformer]:
    """Return a session for tests that do not depend on the kind of model."""
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    return make_session(model), model


def targets(config: TransformerConfig, rows: int, length: int = 5, seed: int = 1) -> Ids:
    return np.random.default_rng(seed).integers(0, config.target_vocab or 0, (rows, length))


def full_logits(model: Transformer, source_ids: Ids, source_mask: Mask, target_ids: Ids) -> np.ndarray:
    """Return the logits of every position without a cache, in float64, one row at a time and without padding."""
    rows = zip(source_ids, source_mask, target_ids, strict=True)
    return np.stack([_row_logits(model.config, tuple(ids[mask]), tuple(new)) for ids, mask, new in rows])


@functools.cache
def _row_logits(config: TransformerConfig, source_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        source = torch.tensor([source_ids])
        logits = _wide(config)(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([target_ids]))[0].numpy()
    logits.setflags(write=False)
    return logits


@functools.cache
def _wide(config: TransformerConfig) -> Transformer:
    return tiny.model(config, dtype=torch.float64)


def assert_candidates(found: Candidates, logits: np.ndarray, k: int) -> None:
    """Compare with numpy's top k and log Σ exp of `logits` [rows, vocab]."""
    assert found.token_ids.dtype == np.int64
    assert found.logits.dtype == found.log_normalizer.dtype == np.float32
    assert found.token_ids.shape == found.logits.shape == (len(logits), k)
    assert found.log_normalizer.shape == (len(logits),)
    assert (np.diff(found.logits) <= 0).all(), "best first"
    assert all(len(set(row)) == k for row in found.token_ids.tolist())
    np.testing.assert_allclose(found.logits, -np.sort(-logits, axis=1)[:, :k], atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.logits, np.take_along_axis(logits, found.token_ids, 1), atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.log_normalizer, np.log(np.exp(logits).sum(1)), atol=ATOL, rtol=0)


def begun(session: Session, source: tuple[Ids, Mask], prompts: Sequence[Sequence[int]], width: int = 1) -> Batch:
    """Return a batch with these sources and prompts."""
    batch = session.batch(width)
    batch.add(tiny.sources(*source), prompts)
    return batch


def test_given_targets_are_scored(session: Session, model: Transformer) -> None:
    source_ids, source_mask = sources(model.config)
    start, eos = model.config.tokens.start, model.config.tokens.eos
    # Pairs leave one after the other, and places change.
    wanted = [[*row[:length].tolist(), eos] for row, length in zip(targets(model.config, 4), (2, 1, 0, 3), strict=True)]
    found = score(
        session, [ids[mask].tolist() for ids, mask in zip(source_ids, source_mask, strict=True)], wanted, batch_size=3
    )
    for row, (target_ids, one) in enumerate(zip(wanted, found, strict=True)):
        read = np.array([[start, *target_ids[:-1]]])
        (logits,) = full_logits(model, source_ids[[row]], source_mask[[row]], read)
        expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(one.log_probs, expected[np.arange(len(target_ids)), target_ids], atol=2 * ATOL)


def test_given_tokens_of_reordered_rows(session: Session, model: Transformer) -> None:
    source_ids, source_mask = sources(model.config)
    read = targets(model.config, 12, 5)
    read[:, 0] = model.config.tokens.start
    batch = begun(session, (source_ids, source_mask), read[::3, :1].tolist(), width=3)
    if not isinstance(batch, ScoresTokens):
        pytest.skip("this backend scores among candidates that are the whole vocabulary")
    for place in range(4):
        batch.step(read[:, place], 2)
        rows = np.array([1, 0, 1]) + np.arange(0, 12, 3)[:, None]
        batch.reorder(rows.ravel())
        read[:, : place + 1] = read[rows.ravel(), : place + 1]
    for bad in (read[:, 3] - 1000, read[:, 3] + session.spec.vocab, read[:2, 3]):
        with pytest.raises(InputError, match="next_ids is"):
            batch.score_step(read[:, 4], bad)
    given = batch.score_step(read[:, 4], read[:, 3])
    assert given.token_ids.tolist() == read[:, [3]].tolist()
    assert batch.lengths.tolist() == [5] * 12
    logits = full_logits(model, source_ids.repeat(3, 0), source_mask.repeat(3, 0), read)[:, -1]
    np.testing.assert_allclose(given.logits, np.take_along_axis(logits, read[:, [3]], 1), atol=ATOL, rtol=0)
    np.testing.assert_allclose(given.log_normalizer, np.log(np.exp(logits).sum(1)), atol=ATOL, rtol=0)


@pytest.mark.parametrize(("prompt_len", "k"), [(1, 1), (1, None), (2, 4), (5, 3)])
def test_steps_equal_the_full_forward(session: Session, model: Transformer, prompt_len: int, k: int | None) -> None:
    source = sources(model.config)
    target_ids = targets(model.config, 4)
    expected = full_logits(model, *source, target_ids)
    k = k or session.spec.vocab
    batch = begun(session, source, target_ids[:, :prompt_len].tolist())
    for position in range(prompt_len - 1, target_ids.shape[1]):
        assert batch.lengths.tolist() == [position] * 4
        assert_candidates(batch.step(target_ids[:, position], k), expected[:, position], k)


def test_prompts_of_unequal_length(one: tuple[Session, Transformer]) -> None:
    session, model = one
    source, target_ids = sources(model.config), targets(model.config, 4)
    expected = full_logits(model, *source, target_ids)
    lengths = [2, 1, 4, 4]
    batch, prompts = session.batch(), [ids[:length] for ids, length in zip(target_ids.tolist(), lengths, strict=True)]
    if not batch.can_join:
        with pytest.raises(InputError, match="concat"):
            batch.add(tiny.sources(*source), prompts)
        return
    batch.add(tiny.sources(*source), prompts)
    assert batch.lengths.tolist() == [length - 1 for length in lengths]
    rows = np.arange(4)
    for step in range(2):
        position = np.array(lengths) - 1 + step
        assert_candidates(batch.step(target_ids[rows, position], 3), expected[rows, position], 3)


ORDERS = {
    "swap": (2, [1, 0, 2, 2, 5, 4, 7, 6]),
    "branch": (3, [0, 0, 0, 5, 4, 5, 8, 7, 6, 10, 10, 9]),
}


@pytest.mark.parametrize(("width", "order"), ORDERS.values(), ids=ORDERS.keys())
def test_reorder(session: Session, model: Transformer, width: int, order: list[int]) -> None:
    source_ids, source_mask = sources(model.config)
    rows = 4 * width
    first = targets(model.config, 4, 1).repeat(width, 0)
    batch = begun(session, (source_ids, source_mask), first[::width].tolist(), width)
    batch.step(first[:, 0], 1)
    middle = targets(model.config, rows, 2, seed=2)  # rows of one source part here
    for position in range(2):
        batch.step(middle[:, position], 1)
    batch.reorder(np.array(order))
    ends = targets(model.config, rows, 2, seed=3)
    history = np.concatenate((np.concatenate((first, middle), 1)[order], ends), 1)
    owners = np.arange(4).repeat(width)
    expected = full_logits(model, source_ids[owners], source_mask[owners], history)
    for position in range(2):
        assert_candidates(batch.step(ends[:, position], 3), expected[:, 3 + position], 3)


@pytest.mark.parametrize("removed", [[1], [3], [0, 2], [3, 0, 1]], ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_remove(one: tuple[Session, Transformer], width: int, removed: list[int]) -> None:
    session, model = one
    source_ids, source_mask = sources(model.config)
    rows, target_ids = 4 * width, targets(model.config, 4 * width, 4)
    target_ids[:, 0] = target_ids[::width, 0].repeat(width)
    batch = begun(session, (source_ids, source_mask), target_ids[::width, :1].tolist(), width)
    for position in range(2):
        batch.step(target_ids[:, position], 1)
    batch.remove(np.array(removed))
    kept = close_up(4, np.array(removed))
    assert sorted(kept.tolist()) == sorted(set(range(4)) - set(removed))
    stay = (kept[:, None] * width + np.arange(width)).ravel()
    owners = np.arange(4).repeat(width)[stay]
    expected = full_logits(model, source_ids[owners], source_mask[owners], target_ids[stay])
    assert batch.lengths.tolist() == [2] * stay.size
    assert rows > stay.size
    for position in (2, 3):
        assert_candidates(batch.step(target_ids[stay, position], 3), expected[:, position], 3)


def test_an_empty_batch_starts_again(one: tuple[Session, Transformer]) -> None:
    session, model = one
    batch = begun(session, sources(model.config), [[1]] * 4)
    batch.step(targets(model.config, 4, 1)[:, 0], 1)
    batch.remove(np.arange(4))
    assert batch.lengths.size == 0
    source, new = sources(model.config, (3, 11), seed=4), targets(model.config, 2, 3, seed=5)
    batch.add(tiny.sources(*source), new[:, :2].tolist())
    expected = full_logits(model, *source, new)
    for position in (1, 2):
        assert_candidates(batch.step(new[:, position], 3), expected[:, position], 3)


def test_sources_join_while_others_are_decoded(session: Session, model: Transformer) -> None:
    first, late = sources(model.config, (4, 6)), sources(model.config, (9, 1, 2), seed=7)
    old, new = targets(model.config, 2, 5), targets(model.config, 3, 4, seed=8)
    batch = begun(session, first, old[:, :1].tolist())
    for position in range(2):
        batch.step(old[:, position], 1)
    if not batch.can_join:
        with pytest.raises(InputError, match="concat"):
            batch.add(tiny.sources(*late), new[:, :2].tolist())
        return
    prompts = [new[0, :2].tolist(), new[1, :1].tolist(), new[2, :3].tolist()]
    batch.add(tiny.sources(*late), prompts)
    assert batch.lengths.tolist() == [2, 2, 1, 0, 2]
    expected = [*full_logits(model, *first, old), *full_logits(model, *late, new)]
    target_ids, rows = [*old, *new], range(5)
    while max(batch.lengths) < 4:
        places = batch.lengths.copy()
        found = batch.step(np.array([target_ids[row][places[row]] for row in rows]), 3)
        assert_candidates(found, np.stack([expected[row][places[row]] for row in rows]), 3)


def test_candidates_belong_to_the_caller(one: tuple[Session, Transformer]) -> None:
    session, model = one
    batch = begun(session, sources(model.config), [[1]] * 4)
    first = batch.step(targets(model.config, 4, 1)[:, 0], 3)
    kept = [array.copy() for array in (first.token_ids, first.logits, first.log_normalizer)]
    batch.step(targets(model.config, 4, 1, seed=5)[:, 0], 3)
    for array, copy in zip((first.token_ids, first.logits, first.log_normalizer), kept, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_equal_logits_come_in_order_of_id(make_session: MakeSession) -> None:
    levels = np.array([0, 2, 1], np.float32)[np.arange(tiny.VOCAB) % 3]
    model = with_logits(levels, tiny.VARIANTS["post"])
    session = make_session(model)
    for k in (1, 5, 13, tiny.VOCAB):
        batch = begun(session, sources(model.config), [[1]] * 4)
        found = batch.step(targets(model.config, 4, 1)[:, 0], k)
        assert found.token_ids.tolist() == [ranked(levels)[:k].tolist()] * 4


def test_several_steps_at_once_are_the_steps(one: tuple[Session, Transformer]) -> None:
    session, model = one
    source = sources(model.config)
    start = targets(model.config, 4, 1)[:, 0]
    single, several = begun(session, source, [[1]] * 4), begun(session, source, [[1]] * 4)
    if not isinstance(several, MultiStep):
        return
    found = several.multi_step(start, GreedySteps(5, 2))
    assert found.token_ids.shape == (5, 4, 2)
    for step in range(5):
        expected = single.step(start, 2)
        np.testing.assert_array_equal(found.token_ids[step], expected.token_ids)
        np.testing.assert_allclose(found.logits[step], expected.logits, atol=ATOL)
        np.testing.assert_allclose(found.log_normalizer[step], expected.log_normalizer, atol=ATOL)
        start = expected.token_ids[:, 0]
    assert several.lengths.tolist() == single.lengths.tolist() == [5] * 4
    stop = int(single.step(start, 1).token_ids[2, 0])
    assert len(several.multi_step(start, GreedySteps(3, 1, frozenset({stop}))).token_ids) == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5}], ids=str)
def test_texts_without_scores_are_the_same(one: tuple[Session, Transformer], options: dict[str, Any]) -> None:
    session, _ = one
    texts = [[5, 6, 7], [8], [9, 10]]
    scored, plain = (
        [best for (best,) in decode(session, texts, DecodeConfig(max_new_tokens=7, return_scores=wanted, **options))]
        for wanted in (True, False)
    )
    assert [one.token_ids for one in plain] == [one.token_ids for one in scored]
    assert [(one.score, one.log_prob) for one in plain] == [(None, None)] * 3
    assert all(one.score and one.log_prob for one in scored)


def test_banned_tokens_do_not_continue_several_steps(one: tuple[Session, Transformer]) -> None:
    session, model = one
    source = sources(model.config)
    start = targets(model.config, 4, 1)[:, 0]
    single, several = begun(session, source, [[1]] * 4), begun(session, source, [[1]] * 4)
    if not isinstance(several, MultiStep):
        return
    banned = frozenset(begun(session, source, [[1]] * 4).step(start, 1).token_ids[:2, 0].tolist())
    found = several.multi_step(start, GreedySteps(5, 3, banned, banned))
    assert len(found.token_ids) == 5
    for step in range(5):
        expected = single.step(start, 3)
        np.testing.assert_array_equal(found.token_ids[step], expected.token_ids)
        start = np.array([next(token for token in row if token not in banned) for row in expected.token_ids.tolist()])


def test_threads_share_a_session(one: tuple[Session, Transformer]) -> None:
    session, model = one

    def run(seed: int) -> list[Candidates]:
        batch = begun(session, sources(model.config, seed=seed), [[1]] * 4, 2)
        found = []
        for position in range(5):
            found.append(batch.step(targets(model.config, 8, 1, seed=seed + position)[:, 0], 4))
            batch.reorder(np.array([1, 0, 2, 3, 5, 5, 7, 6]))
        return found

    alone = [run(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(8)))
    for steps, expected in zip(together, alone, strict=True):
        for found, reference in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(found.token_ids, reference.token_ids)
            np.testing.assert_array_equal(found.logits, reference.logits)
            np.testing.assert_array_equal(found.log_normalizer, reference.log_normalizer)


def test_limits(session: Session, model: Transformer) -> None:
    config = model.config
    limit = config.max_target_length or 0
    longest = sources(config, (config.max_source_length,))
    target_ids = targets(config, 1, limit)
    batch = begun(session, longest, target_ids.tolist())
    expected = full_logits(model, *longest, target_ids)
    assert_candidates(batch.step(target_ids[:, -1], 2), expected[:, -1], 2)
    with pytest.raises(InputError, match=f"target has {limit + 1} tokens, the limit is {limit}"):
        batch.step(target_ids[:, 0], 1)
    with pytest.raises(InputError, match=f"the limit is {config.max_source_length}"):
        session.batch().add(tiny.sources(*sources(config, (config.max_source_length + 1,))), [[1]])
    with pytest.raises(InputError, match=f"expected 1 to {limit}"):
        session.batch().add(tiny.sources(*longest), [[1] * (limit + 1)])


def test_bad_arguments(one: tuple[Session, Transformer]) -> None:
    session, model = one
    ids, mask = sources(model.config)
    batch = session.batch(2)
    for source in (
        (ids.astype(np.int32), mask),
        (ids, mask.astype(np.int64)),
        (ids, mask[:, :-1]),
        (ids, ~mask),
        (ids[:0], mask[:0]),
        (np.where(mask, tiny.VOCAB, ids), mask),
        (np.where(mask, -1, ids), mask),
    ):
        with pytest.raises(InputError):
            batch.add(tiny.sources(*source), [[1]] * 4)
    for prompts in ([[1]] * 3, [[1], [1], [1], []], [[1], [1], [1], [-1]], [[1], [tiny.VOCAB], [1], [1]]):
        with pytest.raises(InputError):
            batch.add(tiny.sources(ids, mask), prompts)
    assert batch.lengths.size == 0
    new = targets(model.config, 4, 1)
    batch.add(tiny.sources(ids, mask), new.tolist())
    rows = new[:, 0].repeat(2)
    for target_ids, k in ((rows[:3], 1), (rows * 0 - 1, 1), (rows, 0), (rows, tiny.VOCAB + 1)):
        with pytest.raises(InputError):
            batch.step(target_ids, k)
    for order in ([], [0, 1], [0, 1, 2, 3, 4, 5, 6, 8], [-1, 1, 2, 3, 4, 5, 6, 7], [2, 1, 0, 3, 4, 5, 6, 7]):
        with pytest.raises(InputError):
            batch.reorder(np.array(order, np.int64))
    for removed in ([4], [-1], [1, 1]):
        with pytest.raises(InputError):
            batch.remove(np.array(removed, np.int64))
    found = batch.step(rows, 2)
    assert_candidates(found, full_logits(model, ids, mask, new)[:, -1].repeat(2, axis=0), 2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_the_order_of_joining_does_not_change_the_output(one: tuple[Session, Transformer], seed: int) -> None:
    session, _ = one
    requests = random_requests(session, 30, seed)
    assert not differing(joining(session, requests, seed), alone(session, requests))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_sources_join_in_any_order(one: tuple[Session, Transformer], seed: int) -> None:
    session, model = one
    requests = random_requests(session, 1000, 0)
    expected = alone(EagerSession(model), requests)
    assert not differing(joining(session, requests, seed, places=16), expected)


def test_rows_with_nan_do_not_affect_others(make_session: MakeSession) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    broken = tiny.VOCAB - 1  # a token of the source that is no number
    with torch.no_grad():
        model.enc.embed.weight[broken] = torch.nan
    session = make_session(model)
    if not session.batch().can_join:
        return
    sound = [request for request in random_requests(session, 30, 1) if broken not in (*request.source, *request.prompt)]
    if model.dec is not None and model.dec.embed.weight is model.enc.embed.weight:
        pytest.fail("the variant ties its embeddings: targets would be broken too")
    expected = alone(session, sound)
    spoilt = [
        dataclasses.replace(request, text=1000 + number, source=[*request.source[:-1], broken])
        for number, request in enumerate(sound[:15])
    ]
    found = joining(session, [*sound, *spoilt], 5, places=4)
    assert not differing({text: found[text] for text in expected}, expected)
    assert all("returned NaN or infinite logits" in str(found[request.text]) for request in spoilt)


def test_an_encoder_only_session_returns_hidden_states(make_session: MakeSession) -> None:
    alone = {"decoder": None, "target_vocab": None, "max_target_length": None}
    config = dataclasses.replace(tiny.VARIANTS["pre-std"], **alone, head="sequence", labels=("a", "b", "c"))
    model = tiny.model(config, dtype=torch.float32)
    session = make_session(model)
    ids, mask = sources(config)
    hidden = session.hidden_states(tiny.sources(ids, mask))
    assert hidden.dtype == np.float32
    assert hidden.shape == (*ids.shape, config.d_model)
    assert np.isfinite(hidden).all()
    wide = tiny.model(config, dtype=torch.float64)
    for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
        with torch.no_grad():
            kept = torch.tensor(row_mask[row_mask])[None]
            expected = wide.hidden_states(torch.tensor(row_ids[row_mask])[None], kept)
            logits = wide.classify(expected, kept)
        np.testing.assert_allclose(hidden[row, row_mask], expected[0], atol=ATOL)
        np.testing.assert_allclose(session.logits(tiny.sources(ids, mask))[row], logits[0], atol=ATOL)
    with pytest.raises(BackendError, match="encoder-only"):
        session.batch()
    with pytest.raises(InputError):
        session.hidden_states(tiny.sources(ids + tiny.VOCAB, mask))


def test_sessions_with_a_decoder_and_closed_ones_refuse(make_session: MakeSession) -> None:
    model = tiny.model(tiny.VARIANTS["post"], dtype=torch.float32)
    session = make_session(model)
    with pytest.raises(BackendError, match="has a decoder"):
        session.hidden_states(tiny.sources(*sources(model.config)))
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.batch()
