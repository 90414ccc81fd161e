"""Alternatives are the best next tokens, each continued like a prefix that ends with it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tests.decode.scripted import EOS, START, ScriptedSession, drawn, table
from tfexport.decode.offline import decode
from tfexport.decode.score import score
from tfexport.errors import BackendError, InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session

VOCAB = 12


def by_hand(
    session: Session, source: list[int], prefix: list[int], count: int, first: list[tuple[int, float]], **settings: Any
) -> list[tuple[tuple[int, ...], float]]:
    """Continue a prefix with each of the `count` best tokens of `first`."""
    found = []
    for token, log_prob in sorted(first, key=lambda pair: -pair[1])[:count]:
        if token == session.spec.tokens.eos:
            found.append(((*prefix, token), log_prob))
            continue
        ((best,),) = decode(session, [source], DecodeConfig(**settings), prefixes=[[*prefix, token]])
        found.append((best.token_ids, log_prob + best.log_prob))
    return found


def next_tokens(session: Session, source: list[int], prefix: list[int]) -> list[tuple[int, float]]:
    """Score every token of the vocabulary after a prefix."""
    vocab = session.spec.vocab
    scores = score(session, [source] * vocab, [[i] for i in range(vocab)], prefixes=[prefix] * vocab, add_eos=False)
    return [(token, one.log_prob) for token, one in enumerate(scores)]


@pytest.mark.parametrize("can_join", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"no_repeat_ngram_size": 2, "max_length": 8}, {"num_beams": 3, "length_penalty": 0.0}]
)
def test_each_best_next_token_is_continued(settings: dict[str, float], can_join: bool) -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB, eos_bias=1), can_join=can_join)
    rng = np.random.default_rng(0)
    sources, prefixes = ([rng.integers(3, VOCAB, rng.integers(1, 4)).tolist() for _ in range(20)] for _ in "ab")
    prefixes[0], prefixes[1] = [], []
    config = DecodeConfig(return_alternatives=True, num_return_sequences=4, **settings)  # type: ignore[arg-type]
    progress: list[int] = []
    found = decode(session, sources, config, prefixes=prefixes, batch_size=6, on_progress=progress.append)
    assert sum(progress) == 20
    for source, prefix, hypotheses in zip(sources, prefixes, found, strict=True):
        first = next_tokens(session, source, prefix)
        if "no_repeat_ngram_size" in settings:
            seen = [START, *prefix]
            repeated = {b for a, b in itertools.pairwise(seen) if a == seen[-1]}
            first = [pair for pair in first if pair[0] not in repeated]
        expected = by_hand(session, source, prefix, 4, first, **settings)
        assert [best.token_ids for best in hypotheses] == [token_ids for token_ids, _ in expected]
        assert [best.log_prob for best in hypotheses] == pytest.approx([value for _, value in expected], rel=1e-5)
        exponent = settings.get("length_penalty", 1)
        for best in hypotheses:
            num_new = len(best.token_ids) - len(prefix)
            assert best.score == pytest.approx(best.log_prob / num_new**exponent, rel=1e-5)
            assert best.finish_reason == ("eos" if best.token_ids[-1] == EOS else "length")


def test_alternatives_computed_by_hand() -> None:
    script = table(
        VOCAB, {(3,): {4: 0.5, 5: 0.25, EOS: 0.125}, (3, 4): {EOS: 0.9}, (3, 5): {6: 0.8}, (3, 5, 6): {EOS: 0.5}}
    )
    config = DecodeConfig(return_alternatives=True, num_return_sequences=3)
    ((one, two, three),) = decode(ScriptedSession(VOCAB, script), [[7]], config, prefixes=[[3]])
    assert [best.token_ids for best in (one, two, three)] == [(3, 4, EOS), (3, 5, 6, EOS), (3, EOS)]
    assert [np.exp(best.log_prob) for best in (one, two, three)] == pytest.approx([0.45, 0.1, 0.125], rel=1e-5)
    config = DecodeConfig(return_alternatives=True, num_return_sequences=2, max_new_tokens=1, min_new_tokens=1)
    ((one, two),) = decode(ScriptedSession(VOCAB, script), [[7]], config, prefixes=[[3]])
    assert [(best.token_ids, best.finish_reason) for best in (one, two)] == [((3, 4), "length"), ((3, 5), "length")]


def test_the_eager_model_and_its_graphs_have_the_same_alternatives(dates_bundle: Path) -> None:
    text, options = "le 14 juillet 1989", {"return_alternatives": True, "num_return_sequences": 3}
    expected = None
    for open_with in ({"backend": "eager"}, *({"variant": variant} for variant in ("concat", "static", "contrib"))):
        with tfexport.load(dates_bundle, threads=1, **open_with) as model:  # type: ignore[arg-type]
            found = model.generate([text], prefixes=["1989-"], **options)
            assert model.tokenizer is not None
            source, prefix = model.tokenizer.encode([text])[0], model.tokenizer.encode_target("1989-")
            by_eager = by_hand(model.session, source, prefix, 3, next_tokens(model.session, source, prefix))
        expected = expected or by_eager
        assert [one.token_ids for one in found] == [token_ids for token_ids, _ in expected]
        log_probs = [one.score * (len(one.token_ids) - len(prefix)) for one in found]
        assert log_probs == pytest.approx([value for _, value in expected], abs=1e-4)
        assert found[0].text == "1989-07-14"
        assert len({one.text[:6] for one in found}) == 3


def test_filters_and_forced_tokens_come_first() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))

    def found(**options: object) -> list[tuple[int, ...]]:
        config = DecodeConfig(return_alternatives=True, **options)  # type: ignore[arg-type]
        return [best.token_ids for best in decode(session, [[7]], config)[0]]

    best = [ids[0] for ids in found(num_return_sequences=12)]
    assert sorted(best) == list(range(VOCAB))
    assert found(num_return_sequences=64) == found(num_return_sequences=12), "there are only 12 tokens"
    left = found(num_return_sequences=12, suppress_tokens=tuple(best[:3]), min_new_tokens=1)
    assert [ids[0] for ids in left] == [token for token in best[3:] if token != EOS]
    assert {ids[0] for ids in found(num_return_sequences=3, forced_bos_token_id=9)} == {9}
    assert len({ids[1] for ids in found(num_return_sequences=3, forced_bos_token_id=9)}) == 3
    assert found(num_return_sequences=3, forced_bos_token_id=EOS) == [(EOS,)]
    assert found(num_return_sequences=3, forced_eos_token_id=(8, 6), max_new_tokens=1) == [(6,), (8,)]
    stopped = DecodeConfig(return_alternatives=True, num_return_sequences=12, stop_strings=("<5>",))
    (texts,) = decode(session, [[7]], stopped, text_of=lambda ids: "".join(f"<{token}>" for token in ids))
    assert [(one.token_ids, one.finish_reason) for one in texts if one.token_ids[0] == 5] == [((5,), "stop")]


def test_errors_name_the_text() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    banned = DecodeConfig(return_alternatives=True, suppress_tokens=tuple(range(VOCAB)))
    with pytest.raises(InputError, match="text 2 has no token to choose from after 0 new ones") as found:
        decode(session, [[7], [8]], banned, prefixes=[[3], []])
    assert found.value.indices == (1,)
    broken = ScriptedSession(VOCAB, lambda source, history: np.full(VOCAB, np.nan if source == (8,) else 0.0))
    with pytest.raises(BackendError, match="NaN or infinite logits for text 2 at new token 1") as failed:
        decode(broken, [[7], [8]], DecodeConfig(return_alternatives=True))
    assert failed.value.indices == (1,)
