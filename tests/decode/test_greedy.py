"""Greedy search and sampling on scripted logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import EOS, START, ScriptedSession, drawn, table
from tfexport.decode.offline import decode, stream
from tfexport.decode.result import Hypothesis
from tfexport.errors import BackendError, InputError
from tfexport.generation import DecodeConfig

SOURCES = st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=5), min_size=1, max_size=7)
SAMPLING = DecodeConfig(do_sample=True, max_new_tokens=8, num_return_sequences=3, temperature=1.3, top_p=0.9, seed=7)


def test_takes_the_best_token_until_the_end() -> None:
    script = table(6, {(): {3: 0.5, 4: 0.4}, (3,): {5: 0.7}, (3, 5): {EOS: 0.6}})
    (found,) = decode(ScriptedSession(6, script), [[7]], DecodeConfig())
    log_prob = math.log(0.5 * 0.7 * 0.6)
    assert found == [Hypothesis((3, 5, EOS), pytest.approx(log_prob / 3), pytest.approx(log_prob), "eos")]


def test_fills_the_model_when_no_limit_is_given() -> None:
    session = ScriptedSession(6, drawn(6, eos_bias=-99), max_target_length=9)
    found = decode(session, [[7], [8]], DecodeConfig(), prefixes=[[], [3, 4]])
    assert [(len(best.token_ids), best.finish_reason) for (best,) in found] == [(9, "length"), (9, "length")]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_long_texts_are_not_cut(num_beams: int) -> None:
    script = drawn(6, eos_bias=-99)
    config = DecodeConfig(num_beams=num_beams)
    (found,) = decode(ScriptedSession(6, script, max_target_length=300), [[7]], config)[0]
    assert len(found.token_ids) == 300
    log_prob = 0.0
    for place, token in enumerate(found.token_ids):
        logits = script((7,), (START, *found.token_ids[:place]))
        log_prob += logits[token] - np.log(np.exp(logits).sum())
    assert found.log_prob == pytest.approx(log_prob, rel=1e-4)


def test_equal_and_infinite_logits() -> None:
    """Equal logits give the lowest id; logits of minus infinity are a ban of the model."""
    for logits, expected in (([0.0] * 6, (0, 0)), ([-np.inf, -np.inf, 0, 1, -np.inf, -np.inf], (3, 3))):
        session = ScriptedSession(6, lambda *_, logits=logits: np.array(logits))
        (found,) = decode(session, [[7]], DecodeConfig(max_new_tokens=2))[0]
        assert found.token_ids == expected


def test_prefix_is_in_the_ids_but_not_in_the_score() -> None:
    script = table(6, {(4, 3): {5: 0.7}, (4, 3, 5): {EOS: 0.6}})
    session = ScriptedSession(6, script)
    (found,) = decode(session, [[7]], DecodeConfig(), prefixes=[[4, 3]])
    assert found == [
        Hypothesis((4, 3, 5, EOS), pytest.approx(math.log(0.42) / 2), pytest.approx(math.log(0.42)), "eos")
    ]
    assert len(session.steps) == 2, "start token and prefix are read when the text is added"


@pytest.mark.parametrize(
    ("lengths", "rows", "removed"),
    [
        ([1, 3, 2], [3, 2, 1], [[0], [0]]),
        ([2, 4, 2, 4, 4], [5, 5, 3, 3], [[0, 2]]),  # a batch whose sources are all done is not emptied
    ],
)
def test_finished_rows_are_removed(lengths: list[int], rows: list[int], removed: list[list[int]]) -> None:
    session = ScriptedSession(6, lambda source, history: np.eye(6)[EOS if len(history) == lengths[source[0]] else 3])
    found = decode(session, [[text] for text in range(len(lengths))], DecodeConfig())
    assert [best.token_ids for (best,) in found] == [(*[3] * (length - 1), EOS) for length in lengths]
    assert [count for count, _ in session.steps] == rows
    assert session.removed == removed


def test_no_more_candidates_are_requested_than_needed() -> None:
    session = ScriptedSession(50, drawn(50, eos_bias=-99))
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 2},
        {"max_new_tokens": 2, "no_repeat_ngram_size": 2, "min_new_tokens": 1, "suppress_tokens": (5, 6)},
        {"max_new_tokens": 3, "no_repeat_ngram_size": 1},  # bans the 1, 2, 3 tokens before
        {"max_new_tokens": 2, "repetition_penalty": 1.1},
        {"max_new_tokens": 1, "repetition_penalty": 0.9},
        {"max_new_tokens": 1, "do_sample": True, "top_k": 9},
        {"max_new_tokens": 1, "do_sample": True, "top_k": 0},
    ]
    for one in options:
        decode(session, [[7]], DecodeConfig(**one))
    assert [count for _, count in session.steps] == [1, 1, 4, 4, 2, 3, 4, 2, 3, 50, 9, 50]


def test_banning_every_token_is_an_error() -> None:
    config = DecodeConfig(no_repeat_ngram_size=1, min_new_tokens=7, max_new_tokens=8)
    with pytest.raises(InputError, match="the text has no token to choose from after 4 new ones"):
        decode(ScriptedSession(6, drawn(6)), [[7]], config)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_broken_logits_name_their_text(bad: float, num_beams: int) -> None:
    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        return np.full(6, bad) if source == (8,) and len(history) == 3 else np.array([0, 0, -9.0, 2, 1, 0])

    with pytest.raises(BackendError, match="text 2 at new token 3"), np.errstate(all="ignore"):
        decode(ScriptedSession(6, script), [[7], [8], [9, 9]], DecodeConfig(num_beams=num_beams))


def test_samples_have_the_probability_they_were_drawn_with() -> None:
    script = table(6, {(): {3: 0.6, 4: 0.3, 5: 0.1 - 3e-9}})
    config = DecodeConfig(do_sample=True, max_new_tokens=1, num_return_sequences=50)
    (samples,) = decode(ScriptedSession(6, script), [[7]], config)
    assert {sample.token_ids for sample in samples} == {(3,), (4,), (5,)}
    for sample in samples:
        assert sample.log_prob == pytest.approx(math.log({3: 0.6, 4: 0.3, 5: 0.1}[sample.token_ids[0]]), abs=1e-5)


@given(sources=SOURCES, batch_size=st.integers(1, 8), mate=st.integers(3, 99))
@settings(max_examples=40, deadline=None)
def test_a_sample_depends_on_seed_and_place_only(sources: list[list[int]], batch_size: int, mate: int) -> None:
    session = ScriptedSession(9, drawn(9))
    found = decode(session, sources, SAMPLING)
    assert_same(decode(session, sources, SAMPLING, batch_size=batch_size), found)
    # The last text at the same place, after other texts.
    mates = [[mate]] * (len(sources) - 1)
    assert_same(decode(session, [*mates, sources[-1]], SAMPLING, batch_size=3)[-1:], found[-1:])


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    """Compare ids exactly and scores but for the last bits, which numpy computes by place in the array."""
    for samples, others in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in others]
        np.testing.assert_allclose([sample.score for sample in samples], [sample.score for sample in others], rtol=1e-6)


def test_samples_differ_between_seeds_texts_and_numbers() -> None:
    config = DecodeConfig(do_sample=True, max_new_tokens=8, num_return_sequences=4, temperature=3.0)
    session = ScriptedSession(30, drawn(30, eos_bias=-99))
    found = decode(session, [[7], [7]], config) + decode(
        session, [[7]], DecodeConfig(**{**config.to_dict(), "seed": 1})
    )
    assert len({sample.token_ids for samples in found for sample in samples}) == 12


def test_a_stream_is_checked_at_once_and_runs_as_it_is_read() -> None:
    session = ScriptedSession(9, drawn(9, eos_bias=-99))
    tokens = stream(session, [7], DecodeConfig())
    assert session.steps == []
    next(tokens)
    next(tokens)
    assert len(session.steps) == 2
    with pytest.raises(InputError, match="the source is empty"):
        stream(session, [], DecodeConfig())
    with pytest.raises(InputError, match=r"num_beams is 2.*set it to 1.*num_return_sequences is 2.*set it to 1"):
        stream(session, [7], DecodeConfig(num_beams=2, num_return_sequences=2))
