"""Beam search on scripted probabilities, worked out by hand, and its independence of the batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import EOS, PAD, START, ScriptedSession, drawn, table
from tfexport.decode._beam import BeamSearch
from tfexport.decode.offline import decode
from tfexport.decode.request import check_requests
from tfexport.decode.result import Hypothesis
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import close_up, pad_right

SOURCES = st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=5), min_size=1, max_size=7)
CONFIGS = st.builds(
    DecodeConfig,
    num_beams=st.integers(2, 4),
    max_new_tokens=st.integers(1, 8),
    length_penalty=st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    no_repeat_ngram_size=st.integers(0, 3),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.4]),
)
# 3 is the better beginning, 4 leads to the better text.
GARDEN_PATH = {
    (): {3: 0.5, 4: 0.4},
    (3,): {5: 0.3, 6: 0.25},
    (4,): {7: 0.9},
    (3, 5): {EOS: 0.5},
    (4, 7): {EOS: 0.9},
    (3, 6): {EOS: 0.2},
    (3, 5, 7): {EOS: 0.5},
}


def beam_search(session: ScriptedSession, sources: list[list[int]], config: DecodeConfig) -> list[list[Hypothesis]]:
    """Search with any number of beams, one too, whatever a request would be refused for."""
    plain = check_requests(session, sources, replace(config, num_beams=1, num_return_sequences=1))
    requests = [replace(request, config=config) for request in plain]
    search, batch = BeamSearch(config, session.spec), session.batch(config.num_beams)
    search.add(requests)
    batch.add(*pad_right(sources, PAD), [request.prompt for request in requests])
    results: dict[int, list[Hypothesis]] = {}
    while search.requests:
        taken = search.take(batch.step(search.history.newest, search.num_candidates()))
        batch.reorder(np.arange(batch.lengths.size) if taken.rows is None else taken.rows)
        results |= {search.requests[place].text: found for place, found in taken.done.items()}  # type: ignore[misc]
        if taken.done:
            left = np.array(list(taken.done))
            search.remove(close_up(len(search.requests), left))
            batch.remove(left)
    return [results[text] for text in range(len(sources))]


def test_finds_what_greedy_misses() -> None:
    session = ScriptedSession(8, table(8, GARDEN_PATH))
    assert decode(session, [[9]], DecodeConfig(max_new_tokens=3))[0][0].token_ids == (3, 5, EOS)
    config = DecodeConfig(num_beams=2, num_return_sequences=2, max_new_tokens=3, length_penalty=2.0)
    best, second = decode(session, [[9]], config)[0]
    assert (best.token_ids, best.finish_reason) == ((4, 7, EOS), "eos")
    assert best.log_prob == pytest.approx(math.log(0.4 * 0.9 * 0.9))
    assert best.score == pytest.approx(math.log(0.4 * 0.9 * 0.9) / 3**2.0)
    assert (second.token_ids, second.finish_reason) == ((3, 5, EOS), "eos")


def test_only_the_better_half_of_the_extensions_may_end() -> None:
    # With two beams, EOS comes third behind 3 and 4: it is no hypothesis, though likelier than (4, 5), .3 · .3 = .09.
    script = table(8, {(): {3: 0.5, 4: 0.3, EOS: 0.15}, (3,): {5: 0.9}, (4,): {5: 0.3}})
    config = DecodeConfig(num_beams=2, num_return_sequences=2, max_new_tokens=2, length_penalty=0.0)
    found = decode(ScriptedSession(8, script), [[9]], config)[0]
    assert [hypothesis.token_ids for hypothesis in found] == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("early_stopping", "steps", "expected"),
    [
        # Both places are filled after one token each way: stop at once.
        (True, 2, (EOS,)),
        # The running beam scores log(.5·.2)/2 = -1.15, better than the second place, log(.5·.1)/2 = -1.50, but not
        # after another token, log(.5·.2·.3)/3 = -1.17 against log(.5·.2·.5)/3 = -1.00, which fills the second place.
        (False, 3, (EOS,)),
        # As long as the limit of six tokens could still help, -3.51/6 = -0.58, it goes on.
        ("never", 6, (3, 5, 6, 6, 6, 6)),
    ],
)
def test_early_stopping(early_stopping: bool | str, steps: int, expected: tuple[int, ...]) -> None:
    rows: dict[tuple[int, ...], dict[int, float]] = {
        (): {EOS: 0.45, 3: 0.5},
        (3,): {EOS: 0.1, 5: 0.2, 7: 0.05},
        (3, 5): {EOS: 0.5, 6: 0.3},
    }
    session = ScriptedSession(
        40, lambda source, history: table(40, rows | {history[1:]: rows.get(history[1:], {6: 0.99})})(source, history)
    )
    config = DecodeConfig(num_beams=2, max_new_tokens=6, early_stopping=early_stopping)  # type: ignore[arg-type]
    (found,) = decode(session, [[9]], config)
    assert (len(session.steps), found[0].token_ids) == (steps, expected)


def test_never_judges_by_the_present_length_where_length_costs() -> None:
    # After two tokens the places hold log .06 = -2.81 and log(.9 · .05) · 2 = -6.20; the running beam would score
    # log(.9 · .6) · 16 = -9.86 at the limit, but scores log(.9 · .6) · 2 = -1.23 now and -2.17 with its end.
    rows = {(): {3: 0.9, EOS: 0.06}, (3,): {5: 0.6, EOS: 0.05}, (3, 5): {EOS: 0.9}}
    script = table(40, rows)
    session = ScriptedSession(40, lambda source, history: script(source, history if history[1:] in rows else (START,)))
    config = DecodeConfig(num_beams=2, max_new_tokens=16, early_stopping="never", length_penalty=-1.0)
    best = decode(session, [[9]], config)[0][0]
    assert (best.token_ids, best.score) == ((3, 5, EOS), pytest.approx(math.log(0.9 * 0.6 * 0.9) * 3))


def test_enough_beams_find_the_best_of_all() -> None:
    vocab, length = 5, 3
    script = drawn(vocab, eos_bias=-99)
    config = DecodeConfig(num_beams=2, max_new_tokens=length)

    def log_prob(tokens: tuple[int, ...]) -> float:
        total = 0.0
        for position, token in enumerate(tokens):
            logits = script((9,), (START, *tokens[:position]))
            total += logits[token] - np.log(np.exp(logits).sum())
        return total

    everything = sorted(itertools.product(range(vocab), repeat=length), key=log_prob, reverse=True)
    # 64 beams hold all 5 · 5 beginnings; the vocabulary need not hold twice as many for this.
    (found,) = beam_search(
        ScriptedSession(vocab, script), [[9]], replace(config, num_beams=64, num_return_sequences=64)
    )
    assert [hypothesis.token_ids for hypothesis in found] == everything[:64]
    np.testing.assert_allclose([one.log_prob for one in found], [log_prob(one) for one in everything[:64]], rtol=1e-5)


def test_settled_sources_leave_the_batch() -> None:
    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        logits = np.arange(6.0)
        logits[EOS] = 20 if len(history) >= source[0] else -20
        return logits

    session = ScriptedSession(6, script)
    config = DecodeConfig(num_beams=2, early_stopping=True, max_new_tokens=8)
    found = decode(session, [[5], [3], [3]], config)
    assert [len(hypotheses[0].token_ids) for hypotheses in found] == [5, 3, 3]
    assert [rows for rows, _ in session.steps] == [6, 6, 6, 2, 2]


def test_forced_first_token_starts_one_beam() -> None:
    session = ScriptedSession(8, table(8, {(3,): {5: 0.3, 6: 0.25}, (3, 5): {EOS: 0.5}, (3, 6): {EOS: 0.2}}))
    config = DecodeConfig(num_beams=2, num_return_sequences=2, forced_bos_token_id=3, max_new_tokens=2)
    found = decode(session, [[9]], config)[0]
    assert [hypothesis.token_ids for hypothesis in found] == [(3, 5), (3, 6)]
    assert found[0].score == pytest.approx(math.log(0.3) / 2)


def test_fewer_hypotheses_where_bans_leave_fewer() -> None:
    config = DecodeConfig(num_beams=2, num_return_sequences=2, max_new_tokens=1, suppress_tokens=(0, 1, 2, 3, 4))
    (found,) = decode(ScriptedSession(6, drawn(6)), [[9]], config)
    assert [hypothesis.token_ids for hypothesis in found] == [(5,)]
    with pytest.raises(InputError, match="the text has no token to choose from after 0 new ones"):
        decode(ScriptedSession(6, drawn(6)), [[9]], replace(config, suppress_tokens=(0, 1, 2, 3, 4, 5)))


def test_equal_scores_come_in_order_of_beam_and_id() -> None:
    config = DecodeConfig(num_beams=10, num_return_sequences=10, max_new_tokens=2)
    found = decode(ScriptedSession(40, lambda *_: np.zeros(40)), [[9]], replace(config, suppress_tokens=(EOS,)))[0]
    assert [hypothesis.token_ids for hypothesis in found] == [(0, token) for token in (0, 1, *range(3, 11))]


@given(sources=SOURCES, config=CONFIGS, batch_size=st.integers(1, 8), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_result_depends_on_its_source_only(
    sources: list[list[int]], config: DecodeConfig, batch_size: int, order: object
) -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=1))
    alone = [decode(session, [source], config)[0] for source in sources]
    assert decode(session, sources, config, batch_size=batch_size) == alone
    shuffled = list(range(len(sources)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    found = decode(session, [sources[text] for text in shuffled], config)
    assert found == [alone[text] for text in shuffled]


@given(sources=SOURCES, ngram=st.integers(0, 3), least=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_one_beam_is_greedy(sources: list[list[int]], ngram: int, least: int) -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=1))
    config = DecodeConfig(no_repeat_ngram_size=ngram, min_new_tokens=least, max_new_tokens=9)
    for (greedy,), (beam,) in zip(decode(session, sources, config), beam_search(session, sources, config), strict=True):
        assert greedy.token_ids == beam.token_ids
        assert greedy.finish_reason == beam.finish_reason
        assert greedy.score == pytest.approx(beam.score, rel=1e-5)
