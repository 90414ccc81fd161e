"""Decoding equals Hugging Face `generate`, id for id, on a Marian with the same random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.decode.marian import EOS, LETTERS, NUM_TEXTS, PAD, TOKENIZER, VOCAB, Pair, make_pair, text_of, their_settings
from tfexport.decode._greedy import distribution
from tfexport.decode._history import History
from tfexport.decode._processors import Processors, sampling_filters
from tfexport.decode.offline import decode
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates

MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair()


@torch.inference_mode()
def generate(pair: Pair, config: DecodeConfig, prefix: list[int] | None = None) -> list[list[tuple[list[int], float]]]:
    """Return ids without the start token and score of each hypothesis of Hugging Face."""
    length = max(map(len, pair.sources))
    ids = torch.tensor([source + [PAD] * (length - len(source)) for source in pair.sources])
    mask = torch.tensor([[1] * len(source) + [0] * (length - len(source)) for source in pair.sources])
    settings = their_settings(config)
    start = settings.decoder_start_token_id
    prompt: dict[str, Any] = {"tokenizer": TOKENIZER} if config.strings else {}
    if prefix and config.prefix_bias_beta:
        prompt["logits_processor"] = LogitsProcessorList([Biased(prefix, config)])
    elif prefix:
        prompt["decoder_input_ids"] = torch.tensor([[start, *prefix]] * len(pair.sources))
    out = pair.theirs.generate(input_ids=ids, attention_mask=mask, generation_config=settings, **prompt)
    scores = out.sequences_scores if config.num_beams > 1 else torch.full((len(out.sequences),), torch.nan)
    found = list(zip(out.sequences[:, 1:].tolist(), scores.tolist(), strict=True))
    n = config.num_return_sequences
    by_text = [found[start : start + n] for start in range(0, len(found), n)]
    return [[(ids, score) for ids, score in texts if not score < NOTHING] for texts in by_text]


class Biased(LogitsProcessor):
    """The mixture of the model's probabilities and a prefix, over the whole vocabulary."""

    def __init__(self, prefix: list[int], config: DecodeConfig) -> None:
        self.prefix, self.beta = torch.tensor(prefix), config.prefix_bias_beta
        self.is_greedy = config.num_beams == 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - 1
        if place >= len(self.prefix):
            return scores
        # Beams pass log-probabilities, which processors may have lowered; greedy search passes logits.
        log_probs = scores.log_softmax(1) if self.is_greedy else scores
        weight = self.beta * (input_ids[:, 1:] == self.prefix[:place]).all(1, keepdim=True)
        onehot = torch.arange(VOCAB) == self.prefix[place]
        return ((1 - weight) * log_probs.exp() + weight * onehot).log()


def assert_equal(theirs: list[list[tuple[list[int], float]]], ours: list[list[Hypothesis]]) -> None:
    for text, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        padded = [[*one.token_ids, *[PAD] * (len(expected[0][0]) - len(one.token_ids))] for one in found]
        scores = [score for _, score in expected]
        # torch.topk does not define which of two equal scores comes first.
        tied = {score for score in scores if scores.count(score) > 1}
        in_order = [ids for ids, score in expected if score not in tied]
        assert [ids for ids, score in zip(padded, scores, strict=True) if score not in tied] == in_order, f"text {text}"
        assert sorted(padded) == sorted(ids for ids, _ in expected), f"text {text}"
        if not np.isnan(scores[0]):
            np.testing.assert_allclose([one.score for one in found], scores, 1e-6, 1e-6, err_msg=f"text {text}")


def check(pair: Pair, prefix: list[int] | None = None, **settings: object) -> list[list[Hypothesis]]:
    limit = {} if "max_length" in settings else {"max_new_tokens": MAX_NEW_TOKENS}
    config = DecodeConfig.from_dict({**limit, **settings})
    prefixes = [prefix] * len(pair.sources) if prefix else None
    ours = decode(pair.session, pair.sources, config, prefixes=prefixes, batch_size=60, text_of=text_of)
    assert_equal(generate(pair, config, prefix), ours)
    return ours


FILTERS = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "words": {"no_repeat_ngram_size": 1},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "at least": {"min_new_tokens": 6},
    "first": {"forced_bos_token_id": 5},
    "suppressed": {"suppress_tokens": [7, 8, 9, 30, EOS]},
    "bad words": {"bad_words_ids": [[7], [8, 9], [PAD, 12], [3, 4, 5], [EOS], [EOS, 4]]},
    "not too short": {"min_length": 9},
    "not first": {"begin_suppress_tokens": [7, 8, 9, 30, EOS]},
    "not after the first": {"begin_suppress_tokens": [7, 8, 9, 30, EOS], "forced_bos_token_id": 5},
    "biased": {"sequence_bias": [[[7], 2.0], [[7], -2.0], [[8, 9], 5.0], [[PAD, 12], -3.0], [[9], -1.0]]},
    "lowered": {"sequence_bias": [[[7, 8], -1.0], [[30], -4.0]]},
    "hurried": {"exponential_decay_length_penalty": [4, 1.2], "eos_token_id": [EOS, 5]},
    "slowed": {"exponential_decay_length_penalty": [1, 0.7]},
    "normalized": {"renormalize_logits": True},
    "normalized after filters": {"renormalize_logits": True, "suppress_tokens": [7, 8], "no_repeat_ngram_size": 1},
    "not the source's": {"encoder_no_repeat_ngram_size": 2, "suppress_tokens": [PAD]},
    "no word of the source": {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 3, "suppress_tokens": [PAD]},
    "last": {"forced_eos_token_id": EOS},
    "last, and no end": {"forced_eos_token_id": 5, "eos_token_id": [EOS, 2]},
    "several ends": {"eos_token_id": [EOS, 5, 17]},
    "another end": {"eos_token_id": 11, "min_new_tokens": 4},
    "another start": {"decoder_start_token_id": 3},
    "with the prompt": {"max_length": 9, "min_length": 5},
    "ends at once": {"forced_bos_token_id": EOS},
}
# transformers gives missing hypotheses a lower score; tfexport leaves them out.
NOTHING = -1e8


def test_greedy(pair: Pair) -> None:
    found = check(pair)
    reasons = [hypotheses[0].finish_reason for hypotheses in found]
    assert len({hypotheses[0].token_ids for hypotheses in found}) > NUM_TEXTS / 2, "the outputs must vary"
    assert 20 < reasons.count("eos") < NUM_TEXTS - 20, "and some must end"


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("length_penalty", "num_beams"), [(-1.0, 3), (0.0, 3), (0.6, 5), (1.0, 2), (1.0, 5), (2.0, 5)])
def test_beams(pair: Pair, num_beams: int, length_penalty: float, early_stopping: object) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    check(pair, num_beams=num_beams, num_return_sequences=num_beams, **options)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_filters(pair: Pair, filters: dict[str, object], num_beams: int) -> None:
    check(pair, num_beams=num_beams, num_return_sequences=num_beams, **filters)


def test_one_of_several_forced_end_tokens(pair: Pair) -> None:
    found = check(pair, forced_eos_token_id=[5, 2])
    cut = [one.token_ids for (one,) in found if one.finish_reason == "length"]
    assert len(cut) > 20
    assert {ids[-1] for ids in cut} == {2}, "among equal scores both choose the lowest id"


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("last", [None, 9])
@pytest.mark.parametrize("first", [5, EOS])
def test_the_only_token_is_forced(pair: Pair, first: int, last: int | None, num_beams: int) -> None:
    found = check(pair, num_beams=num_beams, max_new_tokens=1, forced_bos_token_id=first, forced_eos_token_id=last)
    token = first if last is None else last
    assert {one.token_ids for (one,) in found} == {(token,)}
    assert {one.finish_reason for (one,) in found} == {"eos" if token == EOS else "length"}
    assert {one.log_prob for (one,) in found} == {0.0}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_nothing_is_forced_after_a_prefix(pair: Pair, num_beams: int) -> None:
    found = check(pair, [5, 6], num_beams=num_beams, forced_bos_token_id=9, max_length=14, min_length=7)
    assert {len(one.token_ids) for (one,) in found} <= set(range(6, 14))
    assert {one.token_ids[:2] for (one,) in found} == {(5, 6)}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("strings", ["stop", ["op", "ttt"], ["ospsotp", "s"]], ids=str)
def test_stop_strings(pair: Pair, strings: object, num_beams: int) -> None:
    found = check(pair, num_beams=num_beams, num_return_sequences=num_beams, stop_strings=strings)
    reasons = {one.finish_reason for hypotheses in found for one in hypotheses}
    assert reasons >= {"stop", "eos"}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_stop_string_may_begin_but_not_end_in_the_prefix(pair: Pair, num_beams: int) -> None:
    prefix = [1 + LETTERS.index(token) for token in ("op", "tto")]
    found = check(pair, prefix, num_beams=num_beams, stop_strings=["op", "top"])
    assert {len(one.token_ids) for (one,) in found} > {3}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_one_token_is_generated_after_the_time_limit(pair: Pair, num_beams: int) -> None:
    found = check(pair, num_beams=num_beams, max_time=1e-9)
    assert {len(one.token_ids) for (one,) in found} == {1}
    assert "time" in {one.finish_reason for (one,) in found}


def drawn_settings(rng: np.random.Generator) -> dict[str, object]:
    """Draw options that change the text, with values that do not contradict each other."""

    def ids(count: int) -> list[int]:
        return [int(token) for token in rng.integers(1, PAD, count)]

    options: list[dict[str, object]] = [
        {"no_repeat_ngram_size": int(rng.integers(1, 4))},
        {"repetition_penalty": float(rng.choice([0.8, 1.2, 1.5]))},
        {"encoder_no_repeat_ngram_size": int(rng.integers(1, 4)), "suppress_tokens": [PAD, *ids(2)]},
        {"min_length": int(rng.integers(2, 12))},
        {"max_length": int(rng.integers(2, 20))},
        {"forced_bos_token_id": ids(1)[0]},
        {"forced_eos_token_id": EOS},
        {"bad_words_ids": [ids(rng.integers(1, 4)) for _ in range(rng.integers(1, 30))]},
        {"suppress_tokens": [PAD, *ids(3)]},
        {"begin_suppress_tokens": ids(4)},
        {"sequence_bias": [[ids(rng.integers(1, 3)), float(rng.normal() * 3)] for _ in range(rng.integers(1, 30))]},
        {"exponential_decay_length_penalty": [int(rng.integers(0, 9)), float(rng.choice([0.8, 1.1, 1.4]))]},
        {"renormalize_logits": True},
        {"eos_token_id": [EOS, *ids(rng.integers(0, 3))]},
        {"decoder_start_token_id": ids(1)[0]},
        {"stop_strings": ["".join(rng.choice(list("stop"), 3)) for _ in range(2)]},
    ]
    drawn = {name: value for option in options if rng.random() < 0.5 for name, value in option.items()}
    if "suppress_tokens" in drawn:
        drawn.pop("forced_bos_token_id", None)
    if "decoder_start_token_id" in drawn:
        drawn.pop("stop_strings", None)  # transformers also searches the text of the start token
    num_beams = int(rng.choice([1, 1, 2, 4]))
    if num_beams > 1:
        drawn |= {"length_penalty": float(rng.choice([0.5, 1, 2])), "num_return_sequences": int(rng.integers(1, 3))}
        drawn |= {"early_stopping": [False, True, "never"][rng.integers(3)]}
    return {**drawn, "num_beams": num_beams}


SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.6, "epsilon_cutoff": 0.03}
ELSEWHERE = ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "stop_strings", "max_length")
ONLY_BEAMS = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")


@pytest.mark.parametrize("seed", range(60))
def test_processors_on_random_logits(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left_out = (*ELSEWHERE, "encoder_no_repeat_ngram_size", *ONLY_BEAMS[: 4 * (seed % 2)])
    settings = {name: value for name, value in drawn_settings(rng).items() if name not in left_out}
    if seed % 2:
        settings |= {"do_sample": True, "top_k": 0}
        settings |= {name: value for name, value in {**SAMPLING, "eta_cutoff": 0.1}.items() if rng.random() < 0.5}
    config = DecodeConfig.from_dict(settings)
    theirs = their_settings(config)
    theirs._eos_token_tensor = torch.tensor(config.ends(EOS))
    for num_new in (0, 1, 7):
        rows = rng.integers(0, VOCAB, (8, 3 + num_new))
        scores = rng.normal(size=(8, VOCAB)).astype(np.float32) * 3
        normalizer = np.log(np.exp(scores).sum(1, keepdims=True))
        given = torch.from_numpy(scores - normalizer * (config.num_beams > 1))
        expected = pair.theirs._get_logits_processor(theirs, 3)(torch.from_numpy(rows), given).numpy()

        processors, history = Processors(config, pair.session.spec), History(VOCAB)
        processors.add([Request(0, [5], 1, tuple(row[:3]), config, 20) for row in rows.tolist()])
        history.add(rows.tolist())
        wanted = (config.top_k or VOCAB) if config.do_sample else 2 * config.num_beams
        order = (-scores).argsort(1)[:, : processors.num_candidates(wanted, history)]
        found = Candidates(order, np.take_along_axis(scores, order, 1), normalizer[:, 0])
        new = np.full(len(rows), num_new)
        ids, log_probs = (each[:, :wanted] for each in processors.apply(found, history, new, new + 20))
        if config.do_sample:
            filters = {name: getattr(config, name) for name in sampling_filters(config)}
            log_probs, expected = distribution(log_probs, config.temperature, filters), np.exp(expected)
            expected /= expected.sum(1, keepdims=True)
        elif config.num_beams == 1 and not config.renormalize_logits:
            expected = expected - normalizer
        best = (-expected).argsort(1)[:, :wanted]
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), log_probs, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, best, 1), np.sort(log_probs)[:, ::-1], atol=1e-5)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("seed", range(8))
def test_options_together(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(pair, [5, 6] if seed % 4 == 3 else None, **drawn_settings(rng))


@pytest.mark.parametrize("filters", [{}, {"no_repeat_ngram_size": 2, "suppress_tokens": [6, 8]}], ids=str)
@pytest.mark.parametrize(("beta", "num_beams"), [(0.05, 5), (0.2, 2), (0.5, 5), (0.8, 2)])
def test_beams_biased_towards_a_prefix(pair: Pair, num_beams: int, beta: float, filters: dict[str, object]) -> None:
    check(pair, [5, 6, 5, EOS], prefix_bias_beta=beta)  # greedy
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "prefix_bias_beta": beta, **filters}
    found = check(pair, [5, 6, 5, 6, 7], **options)
    followed = [one.token_ids[:5] == (5, 6, 5, 6, 7) for hypotheses in found for one in hypotheses]
    assert any(followed) == (beta > 0.05)
    assert not all(followed)
