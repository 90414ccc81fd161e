"""Scores are the log-softmax of the model's logits, in any batch; errors name every bad pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.decode.foreign import marian, t5
from tests.decode.scripted import EOS, START, ScriptedSession, drawn, table
from tfexport.decode.offline import decode
from tfexport.decode.score import score
from tfexport.errors import BackendError, InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.session import Limit

VOCAB = 12


@pytest.mark.parametrize("make", [marian, t5])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_scores_are_those_of_transformers(make: Callable[..., tuple], batch_size: int) -> None:
    theirs, ours = make(dtype=torch.float64)
    session, rng = EagerSession(ours), np.random.default_rng(0)
    sources, targets = (
        [rng.integers(2, 47, rng.integers(1, 12)).tolist() for _ in range(13)] for _ in ("sources", "targets")
    )
    scores = score(session, sources, targets, batch_size=batch_size)
    eos = theirs.config.eos_token_id
    for source, target, found in zip(sources, targets, scores, strict=True):
        labels = torch.tensor([[*target, eos]])
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([source]), labels=labels).logits
        expected = logits.log_softmax(-1).gather(2, labels[:, :, None])[0, :, 0]
        assert found.token_ids == (*target, eos)
        np.testing.assert_allclose(found.log_probs, expected, rtol=1e-5, atol=1e-5)
        assert found.log_prob == pytest.approx(float(expected.sum()), rel=1e-5)


def test_probabilities_computed_by_hand() -> None:
    script = table(VOCAB, {(): {5: 0.5}, (5,): {6: 0.25}, (5, 6): {EOS: 0.125}})
    (found,) = score(ScriptedSession(VOCAB, script), [[3]], [[5, 6]])
    assert found.token_ids == (5, 6, EOS)
    assert found.log_probs == pytest.approx([math.log(0.5), math.log(0.25), math.log(0.125)], rel=1e-6)
    assert found.log_prob == math.fsum(found.log_probs)


def test_scores_of_generated_texts_equal_their_log_probs() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB, eos_bias=1))
    sources = [[number, 7] for number in range(3, 20)]
    found = decode(session, sources, DecodeConfig(num_beams=3))
    ended = [(source, best[0]) for source, best in zip(sources, found, strict=True) if best[0].finish_reason == "eos"]
    assert 5 < len(ended) < len(sources)
    scores = score(session, [source for source, _ in ended], [best.token_ids for _, best in ended])
    for (_, best), one in zip(ended, scores, strict=True):
        assert one.token_ids == best.token_ids, "the end is not scored twice"
        assert one.log_prob == pytest.approx(best.log_prob, rel=1e-5)
    scores = score(session, sources, [best[0].token_ids for best in found], add_eos=False)
    assert [one.log_prob for one in scores] == pytest.approx([best[0].log_prob for best in found], rel=1e-5)


def test_the_end_is_optional_and_a_prefix_is_read_only() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    whole = score(session, [[3]], [[4, 5, 6]])[0]
    assert whole.token_ids == (4, 5, 6, EOS)
    assert score(session, [[3]], [[4, 5, 6]], add_eos=False)[0].log_probs == whole.log_probs[:3]
    behind = score(session, [[3]], [[5, 6]], prefixes=[[4]])[0]
    assert (behind.token_ids, behind.log_probs) == (whole.token_ids[1:], whole.log_probs[1:])
    assert score(session, [[3]], [[]], prefixes=[[4, 5, 6]])[0].log_probs == whole.log_probs[3:]
    other = score(session, [[3]], [[4, 5, 6]], start=7)[0]
    assert other.log_probs != whole.log_probs


@pytest.mark.parametrize("can_join", [True, False])
def test_scores_do_not_depend_on_the_batch(can_join: bool) -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB), can_join=can_join)
    rng = np.random.default_rng(0)
    sources, targets, prefixes = (
        [rng.integers(3, VOCAB, rng.integers(least, 6)).tolist() for _ in range(40)] for least in (1, 0, 0)
    )
    expected = [score(session, [s], [t], prefixes=[p])[0] for s, t, p in zip(sources, targets, prefixes, strict=True)]
    progress: list[int] = []
    for batch_size in (1, 7, 64):
        progress.clear()
        found = score(session, sources, targets, prefixes=prefixes, batch_size=batch_size, on_progress=progress.append)
        assert found == expected
        assert (sum(progress), max(progress) <= batch_size) == (40, True)


def test_a_pair_is_removed_after_its_last_token() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    score(session, [[3]] * 3, [[4] * 5, [5], [6] * 3], add_eos=False)
    assert [rows for rows, _ in session.steps] == [3, 2, 2, 1, 1]


def test_every_bad_pair_is_named() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    sources = [[3], [], [3], [3], [3], [3] * 17]
    targets = [[4], [4], [4, 12], [True], [4] * 16, [4] * 15]
    with pytest.raises(InputError) as error:
        score(session, sources, targets)
    assert str(error.value) == (
        "score: pair 2: the source is empty, expected one token or more; "
        "pair 3: target has 12, expected ids 0 to 11; "
        "pair 4: target has True, expected ids 0 to 11; "
        "pair 5: the target has 17 tokens including the end token, the limit is 16; shorten it, "
        "or export with a larger --max-target-length if the model allows it; "
        "pair 6: the source has 17 tokens, the limit is 16; shorten it, "
        "or export with a larger --max-source-length if the model allows it"
    )
    assert error.value.indices == (1, 2, 3, 4, 5)
    for message, arguments in (
        ("score: the target is empty, expected one token or more", {"targets": [[]], "add_eos": False}),
        (
            "the target has 3 tokens after a prefix of 14 including the end token, the limit is 2;",
            {"targets": [[4, 4]], "prefixes": [[4] * 14]},
        ),
        ("score: prefix has -1", {"prefixes": [[-1]]}),
        ("score: start has 12, expected ids 0 to 11", {"start": 12}),
        ("got 2 targets for 1 sources; give one each", {"targets": [[4], [5]]}),
        ("0 prefixes for 1 sources; give one each", {"prefixes": []}),
        ("batch_size is 0", {"batch_size": 0}),
    ):
        with pytest.raises(InputError, match=message):
            score(session, **({"sources": [[3]], "targets": [[4]]} | arguments))  # type: ignore[arg-type]
    assert score(session, [], []) == []
    # The longest that fits: its last token is never read.
    assert len(score(session, [[3]], [[4] * 15])[0].log_probs) == 16


def test_a_backend_that_returns_too_few_tokens_is_refused() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    session.limits = dataclasses.replace(session.limits, candidates=Limit(4, "build for {number}"))
    with pytest.raises(InputError, match=r"best 4 of 12 tokens, not all; use backend ort or eager, or build for 12$"):
        score(session, [[3]], [[4]])


def test_nan_names_the_pair_and_the_token() -> None:
    def script(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        return np.full(VOCAB, np.nan if (source, history) == ((3,), (START, 4)) else 0.0)

    session = ScriptedSession(VOCAB, script)
    with pytest.raises(BackendError, match="NaN or infinite logits for pair 2 at token 2; check its weights") as error:
        score(session, [[5], [3]], [[4, 4, 4], [4, 5]])
    assert error.value.indices == (1,)
    with pytest.raises(BackendError, match="NaN or infinite logits for the pair at token 2; check its weights"):
        score(session, [[3]], [[4, 5]])
