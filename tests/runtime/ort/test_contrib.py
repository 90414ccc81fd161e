"""The contrib form's session: hypotheses that keep their rows, buffers that nobody cleared, and what is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.runtime.test_contract import assert_candidates, contrib_session, exported, sources, targets
from tfexport.decode.config import DecodeConfig
from tfexport.decode.offline import decode
from tfexport.errors import BackendError, InputError
from tfexport.graph.write import write_graphs
from tfexport.models.config import TransformerConfig, model_spec
from tfexport.models.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.cache import FIRST_CAPACITY
from tfexport.runtime.ort.contrib import ContribSession
from tfexport.runtime.session import Candidates, Ids, RunsAhead, Session
from tfexport.spec import ModelSpec

Once = Callable[[str, Callable[[Path], object]], Path]
# The buffers double twice, the second time up to the limit.
LIMIT = 3 * FIRST_CAPACITY


@pytest.fixture(scope="session")
def model() -> Transformer:
    return tiny.model(tiny.config(max_target_length=LIMIT), dtype=torch.float32)


@pytest.fixture(scope="session")
def session(model: Transformer, once: Once) -> Session[Any]:
    opened = contrib_session(model, once)
    assert isinstance(opened, ContribSession)
    return opened


class Pair:
    """Two sessions over one model that are told the same: what one says, the other has to say."""

    def __init__(self, session: Session[Any], model: Transformer, *source: Any) -> None:
        self.session, self.eager = session, EagerSession(model)
        self.state, self.expected = session.encode(*source), self.eager.encode(*source)

    def step(self, target_ids: Ids, num_candidates: int = 3) -> None:
        """Compare the candidates with the logits of every token."""
        every = self.eager.step(self.expected, target_ids, tiny.VOCAB)
        logits = np.empty(every.logits.shape, np.float64)
        np.put_along_axis(logits, every.token_ids, every.logits, 1)
        assert_candidates(self.session.step(self.state, target_ids, num_candidates), logits, num_candidates)

    def reorder(self, rows: Ids) -> None:
        for session, state in ((self.session, self.state), (self.eager, self.expected)):
            session.reorder(state, rows)
        sizes = [(state.batch, state.rows, state.past_len) for state in (self.state, self.expected)]
        assert sizes[0] == sizes[1]


@st.composite
def orders(draw: st.DrawFn, batch: int, beams: int) -> Ids:
    """Draw what `reorder` takes: sources that stay, in any order, each with beams that go on, branch, die or come."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept = rng.permutation(batch) if draw(st.booleans()) else np.arange(batch)
    if draw(st.integers(0, 4)) == 0:
        kept = kept[rng.random(batch) < 0.7] if batch > 1 else kept
        kept = kept if kept.size else np.array([batch - 1])
    new_beams = beams if draw(st.integers(0, 4)) else draw(st.integers(1, 4))
    return (kept[:, None] * beams + rng.integers(0, beams, (kept.size, new_beams))).ravel()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_sequence_of_reorders_says_what_eager_says(data: st.DataObject, session: Session[Any]) -> None:
    """Rows change places, branch, come and leave between steps of one token and of several."""
    model = tiny.model(tiny.config(max_target_length=LIMIT), dtype=torch.float32)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    pair = Pair(session, model, *sources(model.config, tuple(lengths)))
    pair.reorder(np.arange(len(lengths)).repeat(data.draw(st.integers(1, 4))))
    for number in range(data.draw(st.integers(2, 8))):
        for _ in range(data.draw(st.integers(0, 2))):
            pair.reorder(data.draw(orders(pair.state.batch, pair.state.rows // pair.state.batch)))
        width = data.draw(st.sampled_from((1, 1, 1, 2, 3, FIRST_CAPACITY // 2)))
        if pair.state.past_len + width <= LIMIT:
            pair.step(targets(model.config, pair.state.rows, width, seed=number), data.draw(st.sampled_from((1, 5))))


def test_buffers_grow_up_to_the_limit(session: Session[Any], model: Transformer) -> None:
    """Token by token, with rows that come, change places and leave on the way."""
    pair = Pair(session, model, *sources(model.config))
    reorders = {1: [0, 0, 1, 1, 2, 2, 3, 3], 40: [1, 0, 2, 3, 5, 5, 7, 6], 70: [4, 5, 1, 0], 130: [2, 2, 1, 0]}
    for position in range(LIMIT):
        if position in reorders:
            pair.reorder(np.array(reorders[position]))
        pair.step(targets(model.config, pair.state.rows, 1, seed=position))
    with pytest.raises(InputError, match=f"target has {LIMIT + 1} tokens, the limit is {LIMIT}"):
        session.step(pair.state, targets(model.config, pair.state.rows, 1), 1)


@pytest.mark.parametrize("width", [FIRST_CAPACITY - 1, FIRST_CAPACITY, FIRST_CAPACITY + 1, LIMIT - 1])
def test_a_long_prefix_fits_at_once(width: int, session: Session[Any], model: Transformer) -> None:
    pair = Pair(session, model, *sources(model.config))
    pair.step(targets(model.config, 4, width))
    pair.step(targets(model.config, 4, 1, seed=2))


def test_what_nobody_wrote_is_not_read(
    session: Session[Any], model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is not cleared may hold anything, NaN before all."""
    empty = np.empty

    def dirty(*arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
        array = empty(*arguments, **options)
        array.fill(np.nan if np.issubdtype(array.dtype, np.floating) else 1)
        return array

    pair = Pair(session, model, *sources(model.config))
    pair.expected = pair.eager.encode(*sources(model.config))
    monkeypatch.setattr(np, "empty", dirty)
    pair.state = session.encode(*sources(model.config))
    for seed, width in enumerate((3, 1, 2, FIRST_CAPACITY, 1)):
        pair.reorder(np.array([0, 0, 1, 1, 2, 2, 3, 3]) if seed == 1 else np.arange(pair.state.rows)[::-1].copy())
        pair.step(targets(model.config, pair.state.rows, width, seed=seed))


def test_a_step_writes_its_own_place_alone(session: Session[Any], model: Transformer) -> None:
    state = session.encode(*sources(model.config))
    session.step(state, targets(model.config, 4, 2), 1)
    buffers, before = state.cache, state.cache.copy()
    session.step(state, targets(model.config, 4, 1), 1)
    assert state.cache is buffers
    changed = (buffers != before) & ~(np.isnan(buffers) & np.isnan(before))
    assert np.flatnonzero(changed.any((0, 1, 2, 4))).tolist() == [2]


@pytest.mark.parametrize(
    ("rows", "overwritten"),
    [
        ([0, 1, 2, 3, 4, 5], 0),
        ([2, 0, 1, 4, 3, 5], 0),  # ranks change, rows stay
        ([5, 3, 4, 1, 0, 2], 0),  # and so do sources that change places
        ([1, 1, 0, 3, 4, 5], 1),
        ([2, 2, 2, 5, 3, 5], 3),
    ],
)
def test_rows_that_nobody_continues_are_all_that_is_overwritten(
    rows: list[int], overwritten: int, session: Session[Any], model: Transformer
) -> None:
    state = session.encode(*sources(model.config, (9, 4)))
    session.reorder(state, np.array([0, 0, 0, 1, 1, 1]))
    session.step(state, targets(model.config, 6, 3), 1)
    buffers, before = state.cache, state.cache.copy()
    session.reorder(state, np.array(rows))
    assert state.cache is buffers
    changed = (buffers != before)[:, :, :, :3]
    assert len(np.flatnonzero(changed.any((0, 2, 3, 4)))) == overwritten
    np.testing.assert_array_equal(buffers[:, :, :, 3:], before[:, :, :, 3:])


def test_a_closed_session_says_so_in_the_middle_of_a_text(model: Transformer, once: Once) -> None:
    opened = contrib_session(model, once)
    state = opened.encode(*sources(model.config))
    opened.step(state, targets(model.config, 4, 1), 1)
    opened.close()
    opened.close()
    with pytest.raises(BackendError, match="this session is closed; load the bundle again"):
        opened.step(state, targets(model.config, 4, 1), 1)


def test_a_graph_that_is_no_onnx_is_refused(model: Transformer, once: Once, tmp_path: Path) -> None:
    graphs, spec = exported(model, once)
    (tmp_path / "decoder_contrib.onnx").write_bytes(b"no graph")
    with pytest.raises(BackendError, match="decoder_contrib"):
        ContribSession({**graphs, "decoder_contrib": tmp_path / "decoder_contrib.onnx"}, spec)


def test_the_widths_of_the_encoder_are_its_own(tmp_path: Path) -> None:
    """The operators ask for equal widths that 8 divides in the decoder's own attention alone."""
    config: TransformerConfig = tiny.config(encoder={"d_k": 6, "d_v": 10}, attention_bias=False)
    model = tiny.model(config, dtype=torch.float32)
    spec = model_spec(config, "fp32")
    write_graphs(model, spec, tmp_path, forms=("contrib",), opset=18, report=lambda line: None)
    graphs = {path.stem: path for path in tmp_path.glob("*.onnx")}
    pair = Pair(ContribSession(graphs, spec, threads=1), model, *sources(config))
    for seed in range(3):
        pair.step(targets(config, 4, 1, seed=seed))


# ---- many greedy steps at once


class OneByOne:
    """A session that cannot run ahead."""

    def __init__(self, session: Session[Any]) -> None:
        self.spec, self.max_rows, self.max_candidates = session.spec, session.max_rows, session.max_candidates
        self.encode, self.step, self.reorder = session.encode, session.step, session.reorder


@pytest.mark.parametrize("eos", range(4, 12))
def test_running_ahead_finds_what_steps_find(eos: int, session: Session[Any], model: Transformer) -> None:
    """With any token as the end, so that texts end early, late and never; with bans of the end and with prefixes."""
    spec = replace(session.spec, tokens=replace(session.spec.tokens, eos=eos))
    ahead, single = FusedLike(session, spec), OneByOne(FusedLike(session, spec))
    assert isinstance(ahead, RunsAhead)
    assert not isinstance(single, RunsAhead)
    texts = np.random.default_rng(eos).integers(4, tiny.VOCAB, (5, 7)).tolist()
    for options in ({}, {"min_new_tokens": 9}, {"num_return_sequences": 1, "forced_bos_token_id": 3}):
        config = DecodeConfig(max_new_tokens=FIRST_CAPACITY + 6, **options)
        prefixes = None if "forced_bos_token_id" in options else [[5, 6], [], [7], [], [8]]
        found = [decode(each, texts, config, prefixes=prefixes, batch_size=3) for each in (ahead, single)]
        assert found[0] == found[1]


def test_running_ahead_stops_where_a_row_ends(session: Session[Any], model: Transformer) -> None:
    state, expected = (session.encode(*sources(model.config)) for _ in range(2))
    start = targets(model.config, state.rows, 1)
    step = session.step(expected, start, 2)
    again = session.step(expected, step.token_ids[:, :1], 2)
    found = session.ahead(state, start, 2, 10, int(again.token_ids[-1, 0]))  # type: ignore[attr-defined]
    assert len(found.token_ids) <= 2
    assert state.past_len == len(found.token_ids)
    np.testing.assert_array_equal(
        found.logits[: len(found.logits)], np.stack([step.logits, again.logits])[: len(found.logits)]
    )


def test_running_ahead_keeps_to_the_limit(session: Session[Any], model: Transformer) -> None:
    state = session.encode(*sources(model.config))
    with pytest.raises(InputError, match=f"the limit is {LIMIT}"):
        session.ahead(state, targets(model.config, state.rows, 2), 1, LIMIT, 2)  # type: ignore[attr-defined]
    assert state.past_len == 0


def test_numbers_that_are_none_are_found_ahead_too(session: Session[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth token of the second text: a session that gives NaN there is refused by that name."""
    ahead = session.ahead  # type: ignore[attr-defined]

    def broken(state: Any, target_ids: Ids, num_candidates: int, steps: int, stop_id: int) -> Candidates:
        found: Candidates = ahead(state, target_ids, num_candidates, steps, stop_id)
        found.logits[4, 1], found.log_normalizer[4, 1] = np.nan, np.nan
        return found

    monkeypatch.setattr(session, "ahead", broken)
    with pytest.raises(BackendError, match="infinite logits for text 2 at new token 5;"):
        decode(session, [[4, 5], [6, 7], [8, 9]], DecodeConfig(max_new_tokens=12, min_new_tokens=12))


class FusedLike(OneByOne):
    """The session with another specification."""

    def __init__(self, session: Session[Any], spec: ModelSpec) -> None:
        super().__init__(session)
        self.spec, self.ahead = spec, session.ahead  # type: ignore[attr-defined]
