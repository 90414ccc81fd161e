"""Beam search on scripted probabilities, computed by hand, and its independence of the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import EOS, ScriptedSession, drawn, table
from tfexport.decode.offline import decode
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig

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


def test_beam_search_finds_a_better_text_than_greedy_search() -> None:
    session = ScriptedSession(8, table(8, GARDEN_PATH))
    assert decode(session, [[9]], DecodeConfig(max_new_tokens=3))[0][0].token_ids == (3, 5, EOS)
    config = DecodeConfig(num_beams=2, num_return_sequences=2, max_new_tokens=3, length_penalty=2.0)
    best, second = decode(session, [[9]], config)[0]
    assert (best.token_ids, best.finish_reason) == ((4, 7, EOS), "eos")
    assert best.log_prob == pytest.approx(math.log(0.4 * 0.9 * 0.9))
    assert best.score == pytest.approx(math.log(0.4 * 0.9 * 0.9) / 3**2.0)
    assert (second.token_ids, second.finish_reason) == ((3, 5, EOS), "eos")


@pytest.mark.parametrize(
    ("early_stopping", "steps", "expected"),
    [
        # Both places are filled after one token each: stop at once.
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


def test_settled_sources_are_removed_from_the_batch() -> None:
    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        logits = np.arange(6.0)
        logits[EOS] = 20 if len(history) >= source[0] else -20
        return logits

    session = ScriptedSession(6, script)
    config = DecodeConfig(num_beams=2, early_stopping=True, max_new_tokens=8)
    found = decode(session, [[5], [3], [3]], config)
    assert [len(hypotheses[0].token_ids) for hypotheses in found] == [5, 3, 3]
    assert [rows for rows, _ in session.steps] == [6, 6, 6, 2, 2]


def test_banned_tokens_may_leave_fewer_hypotheses() -> None:
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
