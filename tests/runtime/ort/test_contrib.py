"""Batches of the contrib decoder variant: rows, buffers, copies, and several steps in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.runtime.exported import LONG, Once, sources
from tests.runtime.joining import alone, differing, joining, random_requests
from tests.runtime.test_contract import assert_candidates, begun, contrib_session, targets
from tfexport.contract import ModelSpec
from tfexport.decode.offline import decode
from tfexport.errors import BackendError, InputError
from tfexport.export.write import write_graphs
from tfexport.generation import DecodeConfig
from tfexport.nn.config import model_spec
from tfexport.nn.transformer import Transformer
from tfexport.runtime.cpu import Threads
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort import backend
from tfexport.runtime.ort._cache import FIRST_CAPACITY
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Batch, Candidates, GreedySteps, Ids, Limits, Mask, MultiStep, Session

# The buffers double twice, the second time up to the limit.
LIMIT = 3 * FIRST_CAPACITY


@pytest.fixture(scope="session")
def model() -> Transformer:
    return tiny.model(LONG, dtype=torch.float32)


@pytest.fixture(scope="session")
def session(model: Transformer, once: Once) -> OrtSession:
    opened = contrib_session(model, once)
    assert isinstance(opened, OrtSession)
    return opened


class Pair:
    """A batch and an eager batch that get the same calls and must return the same."""

    def __init__(self, session: Session, model: Transformer, width: int) -> None:
        self.batches: tuple[Batch, Batch] = (session.batch(width), EagerSession(model).batch(width))

    @property
    def rows(self) -> int:
        return int(self.batches[0].lengths.size)

    @property
    def sources(self) -> int:
        return self.rows // self.batches[0].width

    def call(self, name: str, *arguments: object) -> None:
        for batch in self.batches:
            getattr(batch, name)(*arguments)
        assert self.batches[0].lengths.tolist() == self.batches[1].lengths.tolist()

    def add(self, source: tuple[Ids, Mask], prompts: Sequence[Sequence[int]]) -> None:
        self.call("add", tiny.sources(*source), prompts)

    def step(self, target_ids: Ids, num_candidates: int = 3) -> None:
        """Compare the candidates with the logits of every token."""
        every = self.batches[1].step(target_ids, tiny.VOCAB)
        logits = np.empty(every.logits.shape, np.float64)
        np.put_along_axis(logits, every.token_ids, every.logits, 1)
        assert_candidates(self.batches[0].step(target_ids, num_candidates), logits, num_candidates)


def ids_of(pair: Pair, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, pair.rows)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), width=st.integers(1, 4))
def test_any_sequence_of_changes_equals_eager(data: st.DataObject, width: int, session: OrtSession) -> None:
    model = tiny.model(LONG, dtype=torch.float32)
    pair = Pair(session, model, width)
    for number in range(data.draw(st.integers(2, 10))):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        lengths = data.draw(st.lists(st.integers(1, 9), max_size=3)) if pair.rows else [4]
        if lengths:
            prompts = [rng.integers(0, tiny.VOCAB, rng.choice((1, 1, 2, 5))).tolist() for _ in lengths]
            pair.add(sources(model.config, tuple(lengths), seed=number), prompts)
        for _ in range(data.draw(st.integers(0, 2))):
            by_source = rng.integers(0, width, (pair.sources, width)) + np.arange(pair.sources)[:, None] * width
            pair.call("reorder", by_source.ravel())
        pair.step(ids_of(pair, number), data.draw(st.sampled_from((1, 5))))
        if data.draw(st.integers(0, 2)) == 0:
            pair.call("remove", np.flatnonzero(rng.random(pair.sources) < 0.5))


def test_buffers_grow_up_to_the_limit(session: OrtSession, model: Transformer) -> None:
    pair = Pair(session, model, 2)
    pair.add(sources(model.config), [[1]] * 4)
    for position in range(LIMIT):
        if position == 40:
            pair.call("reorder", np.array([1, 0, 2, 3, 5, 5, 7, 6]))
        if position == 70:
            pair.call("remove", np.array([1, 0]))
        pair.step(ids_of(pair, position))
    with pytest.raises(InputError, match=f"target has {LIMIT + 1} tokens, the limit is {LIMIT}"):
        pair.batches[0].step(ids_of(pair, 0), 1)


@pytest.mark.parametrize("length", [FIRST_CAPACITY, FIRST_CAPACITY + 1, FIRST_CAPACITY + 2, LIMIT - 1])
@pytest.mark.parametrize("width", [1, 2])
def test_a_long_prompt_fits_at_once(length: int, width: int, session: OrtSession, model: Transformer) -> None:
    pair = Pair(session, model, width)
    pair.add(sources(model.config, (3,)), [[1]])
    pair.step(ids_of(pair, 0))
    pair.add(sources(model.config), targets(model.config, 4, length).tolist())
    pair.step(ids_of(pair, 1))


def test_unwritten_positions_are_not_read(
    session: OrtSession, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(session, 40, 0)
    expected = alone(session, requests)
    empty = np.empty

    def dirty(*arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
        array = empty(*arguments, **options)
        array.fill(np.nan if np.issubdtype(array.dtype, np.floating) else 1)
        return array

    monkeypatch.setattr(np, "empty", dirty)
    assert not differing(joining(session, requests, 1), expected)


def test_sources_that_are_encoded_before_they_join_change_no_result(
    session: OrtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(session, 40, 1)
    expected = alone(session, requests)
    monkeypatch.setattr(ContribBatch, "_encode", None)
    assert not differing(joining(session, requests, 1, is_ahead=True), expected)


@pytest.mark.parametrize(
    ("threads", "cores", "expected"),
    [(Threads(1, 1), 2, True), (Threads(1, 1), 1, False), (Threads(2, 2), 2, False), (None, 2, False)],
)
def test_sources_are_encoded_ahead_if_encoder_and_decoder_have_cores_of_their_own(
    threads: Threads | None, cores: int, expected: bool, session: OrtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "threads", threads)
    monkeypatch.setattr(backend, "available_cores", lambda: cores)
    assert session.can_encode_ahead == expected


def test_buffers_of_earlier_batches_do_not_change_results(session: OrtSession, model: Transformer, once: Once) -> None:
    rng, fresh = np.random.default_rng(0), contrib_session(model, once)
    for count, num_beams in ((3, 1), (1, 1), (9, 2), (9, 1), (2, 2), (9, 2), (5, 1), (9, 1)):
        lengths = rng.choice((3, 30), count)  # which are encoded apart
        texts = [rng.integers(4, tiny.VOCAB, length).tolist() for length in lengths]
        prefixes = [rng.integers(4, tiny.VOCAB, count % 3).tolist() for _ in texts]
        config = DecodeConfig(num_beams=num_beams, max_new_tokens=int(rng.integers(2, 70)))
        fresh._graphs.spare.clear()
        expected = decode(fresh, texts, config, prefixes=prefixes)
        assert decode(session, texts, config, prefixes=prefixes) == expected


def test_a_step_writes_only_its_own_positions(session: OrtSession, model: Transformer) -> None:
    batch = begun(session, sources(model.config), [[1], [1, 2], [1], [3]])
    assert isinstance(batch, ContribBatch)
    batch.step(np.array([1, 2, 1, 3]), 1)
    buffers, before = batch._cache, batch._cache.copy()
    batch.step(np.array([4, 4, 4, 4]), 1)
    assert batch._cache is buffers
    changed = (buffers != before) & ~(np.isnan(buffers) & np.isnan(before))
    written = changed[:, :4].any((0, 2, 4))  # [rows, capacity]
    assert [np.flatnonzero(row).tolist() for row in written] == [[1], [2], [1], [1]]


@pytest.mark.parametrize(
    ("rows", "overwritten"),
    [
        ([0, 1, 2, 3, 4, 5], 0),
        ([2, 0, 1, 4, 3, 5], 0),  # ranks change, rows stay
        ([1, 1, 0, 3, 4, 5], 1),
        ([2, 2, 2, 5, 3, 5], 3),
    ],
)
def test_only_abandoned_rows_are_overwritten(
    rows: list[int], overwritten: int, session: OrtSession, model: Transformer
) -> None:
    batch = begun(session, sources(model.config, (9, 4)), [[1]] * 2, 3)
    assert isinstance(batch, ContribBatch)
    batch.step(np.full(6, 1), 1)
    for position in range(2):
        batch.step(targets(model.config, 6, 2)[:, position], 1)
    buffers, before = batch._cache, batch._cache.copy()
    batch.reorder(np.array(rows))
    assert batch._cache is buffers
    changed = (buffers != before)[:, :6, :, :3]
    assert len(np.flatnonzero(changed.any((0, 2, 3, 4)))) == overwritten
    np.testing.assert_array_equal(buffers[:, :, :, 3:], before[:, :, :, 3:])


def test_closing_a_session_during_decoding_raises(model: Transformer, once: Once) -> None:
    opened = contrib_session(model, once)
    batch = begun(opened, sources(model.config), [[1]] * 4)
    batch.step(np.full(4, 1), 1)
    opened.close()
    opened.close()
    with pytest.raises(BackendError, match="this session is closed; load the bundle again"):
        batch.step(np.full(4, 1), 1)


def test_encoder_and_decoder_may_have_different_widths(tmp_path: Path) -> None:
    """Only in the decoder's self-attention, the operators need equal widths divisible by 8."""
    config = tiny.config(encoder={"d_k": 6, "d_v": 10}, attention_bias=False)
    model = tiny.model(config, dtype=torch.float32)
    spec = model_spec(config, "fp32")
    write_graphs(model, spec, tmp_path, variants=("contrib",), opset=18, report=lambda line: None)
    graphs = {path.stem: path for path in tmp_path.glob("*.onnx")}
    pair = Pair(OrtSession(Graphs(graphs, spec), "contrib", threads=1), model, 1)
    pair.add(sources(config), [[1]] * 4)
    for seed in range(3):
        pair.step(ids_of(pair, seed))


# ---- several greedy steps in one call


class OtherEnd:
    """The session with another end of texts, whose batches take several steps in one call or do not."""

    backend, accuracy = "ort", "fp32"

    def __init__(self, session: OrtSession, spec: ModelSpec, *, multi_step: bool) -> None:
        self._session, self.spec, self._multi_step = session, spec, multi_step
        self.limits = Limits.of(spec)

    def batch(self, width: int = 1) -> Batch:
        batch = self._session.batch(width)
        return batch if self._multi_step else cast(Batch, OneByOne(batch))


class OneByOne:
    """A batch that takes no steps together."""

    def __init__(self, inner: Batch) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        if name == "multi_step":
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("eos", range(4, 12))
def test_several_steps_equal_single_steps(eos: int, session: OrtSession) -> None:
    spec = replace(session.spec, tokens=replace(session.spec.tokens, eos=eos))
    several, single = (OtherEnd(session, spec, multi_step=multi_step) for multi_step in (True, False))
    assert isinstance(several.batch(), MultiStep)
    assert not isinstance(single.batch(), MultiStep)
    texts = np.random.default_rng(eos).integers(4, tiny.VOCAB, (5, 7)).tolist()
    every: list[dict[str, Any]] = [
        {},
        {"min_new_tokens": 9},
        {"forced_bos_token_id": 3},
        {"eos_token_id": (eos, 13, 20)},
        {"suppress_tokens": (5, 6, 7), "bad_words_ids": ((15,), (16,))},
        {"forced_eos_token_id": (9, 8), "eos_token_id": (eos, 9), "suppress_tokens": (21,), "min_length": 6},
    ]
    for options in every:
        config = DecodeConfig(max_new_tokens=FIRST_CAPACITY + 6, **options)
        prefixes = None if "forced_bos_token_id" in options else [[5, 6], [], [7], [], [8]]
        found = [decode(each, texts, config, prefixes=prefixes, batch_size=3) for each in (several, single)]  # type: ignore[arg-type]
        assert found[0] == found[1]


@pytest.mark.parametrize(("num_suppressed", "together"), [(2, True), (16, True), (17, False)])
def test_few_suppressed_tokens_and_several_ends_leave_steps_together(
    num_suppressed: int, together: bool, session: OrtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, multi_step = [], ContribBatch.multi_step

    def counted(batch: ContribBatch, target_ids: Ids, steps: GreedySteps) -> Candidates:
        found = multi_step(batch, target_ids, steps)
        taken.append(len(found.token_ids))
        return found

    monkeypatch.setattr(ContribBatch, "multi_step", counted)
    config = DecodeConfig(suppress_tokens=tuple(range(4, 4 + num_suppressed)), eos_token_id=(21, 22), max_new_tokens=12)
    decode(session, [[4, 5], [6, 7], [8, 9]], config)
    assert bool(taken) == together
    assert num_suppressed > 2 or max(taken) > 1


def test_several_steps_stop_at_the_limit(session: OrtSession, model: Transformer) -> None:
    batch = begun(session, sources(model.config), [[1], [1, 2], [1], [1]])
    assert isinstance(batch, MultiStep)
    with pytest.raises(InputError, match=f"the limit is {LIMIT}"):
        batch.multi_step(np.full(4, 2), GreedySteps(LIMIT, 1, frozenset({2})))
    assert batch.lengths.tolist() == [0, 1, 0, 0]  # type: ignore[attr-defined]


def test_nan_within_several_steps_is_reported_with_its_place(
    session: OrtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    multi_step = ContribBatch.multi_step

    def broken(batch: ContribBatch, target_ids: Ids, steps: GreedySteps) -> Candidates:
        found = multi_step(batch, target_ids, steps)
        found.logits[4, 1], found.log_normalizer[4, 1] = np.nan, np.nan
        return found

    monkeypatch.setattr(ContribBatch, "multi_step", broken)
    with pytest.raises(BackendError, match="infinite logits for text 2 at new token 5;"):
        decode(session, [[4, 5], [6, 7], [8, 9]], DecodeConfig(max_new_tokens=12, min_new_tokens=12))
