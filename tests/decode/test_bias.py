"""Biased prefixes on scripted logits and on models/dates; for transformers see test_hugging_face.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfexport
from tests.decode.scripted import EOS, ScriptedSession, drawn, table
from tfexport.decode.offline import decode, stream
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig

VOCAB = 12
TEXTS = ["Dienstag, 3. März 2026", "le 14 juillet 1989", "30 июня 2019 г.", "03/05/2026"]
PREFIXES = ["2026-04", "", "1999-12-31", "2026-0"]
Found = list[tuple[tuple[int, ...], float]]


def test_probabilities_computed_by_hand() -> None:
    script = table(VOCAB, {(): {4: 0.5, 5: 0.3}, (5,): {6: 0.8, EOS: 0.1}, (5, 6): {EOS: 0.9}, (4,): {EOS: 0.9}})

    def found(beta: float) -> tuple[tuple[int, ...], float]:
        config = DecodeConfig(prefix_bias_beta=beta)
        ((best,),) = decode(ScriptedSession(VOCAB, script), [[7]], config, prefixes=[[5, EOS]])
        return best.token_ids, float(np.exp(best.log_prob))

    # 5 is the best token if 0.3 (1 - beta) + beta > 0.5 (1 - beta), so beta > 1/6; the end if beta > 7/17.
    assert found(0.1) == ((4, EOS), pytest.approx(0.9 * 0.5 * 0.9))
    assert found(0.2) == ((5, 6, EOS), pytest.approx((0.8 * 0.3 + 0.2) * 0.8 * 0.8 * 0.9))
    assert found(0.5) == ((5, EOS), pytest.approx((0.5 * 0.3 + 0.5) * (0.5 * 0.1 + 0.5)))


TOKENS = st.integers(3, VOCAB - 1)
PAIRS = st.tuples(st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, max_size=6))


@settings(max_examples=60, deadline=None)
@given(st.lists(PAIRS, min_size=1, max_size=4), st.sampled_from([1, 3]), st.integers(0, 1000))
def test_a_beta_near_1_forces_the_prefix_and_one_near_0_ignores_it(
    pairs: list[tuple[list[int], list[int]]], num_beams: int, seed: int
) -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB, seed=seed), max_target_length=24)
    sources, prefixes = [source for source, _ in pairs], [prefix for _, prefix in pairs]
    penalty = {"length_penalty": 0.0} if num_beams > 1 else {}  # then a longer text does not change the score

    def found(beta: float, prefixes: list[list[int]] | None, limit: int, some: list[list[int]]) -> Found:
        config = DecodeConfig(num_beams=num_beams, prefix_bias_beta=beta, max_new_tokens=limit, **penalty)
        return [(best.token_ids, best.log_prob) for (best,) in decode(session, some, config, prefixes=prefixes)]

    for source, prefix in pairs:
        ((forced, log_prob),) = found(0, [prefix], 8, [source])
        ((biased, other),) = found(1 - 1e-12, [prefix], 8 + len(prefix), [source])
        assert biased == forced
        assert other == pytest.approx(log_prob, abs=1e-4)
    free = found(0, None, 8, sources)
    nearly_free = found(1e-12, prefixes, 8, sources)
    assert [ids for ids, _ in nearly_free] == [ids for ids, _ in free]
    assert [value for _, value in nearly_free] == pytest.approx([value for _, value in free], abs=1e-4)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("beta", [0.3, 0.7])
def test_the_eager_model_and_its_graphs_agree(dates_bundle: Path, beta: float, num_beams: int) -> None:
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "prefix_bias_beta": beta}
    expected = None
    for open_with in ({"backend": "eager"}, *({"variant": variant} for variant in ("concat", "static", "contrib"))):
        with tfexport.load(dates_bundle, threads=1, **open_with) as model:  # type: ignore[arg-type]
            found = model.generate(TEXTS, prefixes=PREFIXES, batch_size=3, **options)
        expected = expected or found
        assert [(one.index, one.text) for one in found] == [(one.index, one.text) for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)


def test_a_text_may_diverge_from_its_prefix(dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle) as model:
        texts = [
            model.generate(["03/05/2026"], prefixes=["2026-06-0"], prefix_bias_beta=beta)[0].text
            for beta in (0, 0.01, 0.5, 0.9999)
        ]
        streamed = "".join(model.stream("03/05/2026", prefix="2026-06-0", prefix_bias_beta=0.5))
    assert texts[1] == "2026-05-03"
    assert texts[0] == texts[3] != texts[1]
    assert streamed == texts[2]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_all_candidates_are_requested_only_while_a_prefix_is_followed(num_beams: int) -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB, eos_bias=-9))
    config = DecodeConfig(num_beams=num_beams, prefix_bias_beta=0.999, max_new_tokens=8)
    decode(session, [[3], [4, 5]], config, prefixes=[[6, 7], [8, 9, 10]])
    fewer = 1 if num_beams == 1 else 2 * num_beams
    assert [count for _, count in session.steps] == [VOCAB] * 3 + [fewer] * 5


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_prefix_may_have_banned_tokens(num_beams: int) -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    options = {"suppress_tokens": (6,), "min_new_tokens": 5, "no_repeat_ngram_size": 1, "num_beams": num_beams}
    config = DecodeConfig(**options, prefix_bias_beta=0.999)  # type: ignore[arg-type]
    (((best, *_),)) = decode(session, [[3]], config, prefixes=[[5, 6, 5, EOS]])
    assert (best.token_ids, best.finish_reason) == ((5, 6, 5, EOS), "eos")
    assert best.log_prob == pytest.approx(4 * np.log(0.999), abs=1e-2)
    config = DecodeConfig(**options, prefix_bias_beta=0.001)  # type: ignore[arg-type]
    ((best, *_),) = decode(session, [[3]], config, prefixes=[[5, 6, 5, EOS]])
    assert 6 not in best.token_ids
    assert len(set(best.token_ids)) == len(best.token_ids) > 5


def test_forced_and_fixed_tokens_are_as_without_a_bias() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB, eos_bias=-9))
    config = DecodeConfig(prefix_bias_beta=0.9, forced_bos_token_id=9, forced_eos_token_id=11, max_new_tokens=3)
    texts = [best.token_ids for (best,) in decode(session, [[3]] * 2, config, prefixes=[[5, 6, 7, 8], []])]
    assert texts[0] == (5, 6, 11), "nothing is forced after a prefix, except at the limit"
    assert texts[1][0] == 9
    fixed = DecodeConfig(prefix_bias_beta=1e-9, max_new_tokens=3)
    ((best,),) = decode(session, [[3]], fixed, prefixes=[[5, 6, 7]], num_fixed=2)
    ((forced,),) = decode(session, [[3]], DecodeConfig(max_new_tokens=3), prefixes=[[5, 6]])
    assert best.token_ids == forced.token_ids
    ((best,),) = decode(session, [[3]], DecodeConfig(prefix_bias_beta=0.9999), prefixes=[[5, 6, 7, 4]], num_fixed=2)
    assert best.token_ids[:4] == (5, 6, 7, 4)
    assert tuple(stream(session, [3], DecodeConfig(prefix_bias_beta=0.9999), prefix=[5, 6, 7, 4])) == best.token_ids


def test_a_prefix_longer_than_a_text_can_be() -> None:
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    ((best,),) = decode(session, [[3]], DecodeConfig(prefix_bias_beta=0.9999), prefixes=[[5] * 40])
    assert best.token_ids == (5,) * 16
    with pytest.raises(InputError, match="prefix of 40"):
        decode(session, [[3]], DecodeConfig(), prefixes=[[5] * 40])
