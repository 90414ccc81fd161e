"""Samples are drawn with the probabilities of Hugging Face `generate`: 5,000 draws of each of 20 combinations.

The first two tokens of each text are counted. Expected are the probabilities of transformers with the same weights,
after all processors; those of the second token are weighted with the probability of the first. A cell is a token that
is expected 20 times or more, or all rarer tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from tests.decode.marian import EOS, VOCAB, Pair, make_pair, their_settings
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig

SOURCE, PREFIX = [5, 9, 5, 30, 11, 17], [5, 6, 5]
MANY = list(range(5, 30))  # tokens with logits above and below 0, which penalties treat differently
DRAWS, LEAST = 5000, 20
ENDED = VOCAB  # follows the end of a text

COMBINATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sharp": {"temperature": 0.6},
    "flat": {"temperature": 1.8, "top_k": 0},
    "few": {"top_k": 5},
    "nucleus": {"top_k": 0, "top_p": 0.7},
    "sharp, few, nucleus": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "flat, few, nucleus": {"temperature": 1.5, "top_k": 30, "top_p": 0.8},
    "penalty": {"prefix": MANY, "repetition_penalty": 1.5},
    "reward": {"prefix": MANY, "repetition_penalty": 0.6, "top_k": 20},
    "n-grams": {"prefix": PREFIX, "no_repeat_ngram_size": 2},
    "words": {"prefix": PREFIX, "no_repeat_ngram_size": 1, "top_p": 0.9},
    "not the source's": {"encoder_no_repeat_ngram_size": 1, "temperature": 1.4},
    "suppressed": {"suppress_tokens": [7, 8, 9, 30, 31, 40], "top_k": 10},
    "bad words": {"prefix": PREFIX, "bad_words_ids": [[7], [5, 8], [6, 5, 9], [EOS]], "temperature": 0.8},
    "not first": {"begin_suppress_tokens": [7, 8, 9, 30, 31], "min_p": 0.05},
    "biased": {"prefix": PREFIX, "sequence_bias": [[[7], 2.0], [[5, 8], 3.0], [[6, 5, 9], -2.0]], "eta_cutoff": 0.02},
    "hurried": {"prefix": PREFIX, "exponential_decay_length_penalty": [0, 1.5], "typical_p": 0.8},
    "normalized": {"renormalize_logits": True, "top_k": 0, "epsilon_cutoff": 0.01},
    "several ends": {"eos_token_id": [EOS, 5, 17], "top_p": 0.95},
    "no end yet": {"min_new_tokens": 2, "temperature": 2.0},
    "forced first": {"forced_bos_token_id": 5, "temperature": 0.9},
    "forced last": {"forced_eos_token_id": [EOS, 5, 9], "max_new_tokens": 2, "temperature": 3.0},
    "another start": {"decoder_start_token_id": 3, "min_length": 3, "repetition_penalty": 1.2, "top_k": 0},
    "all": {
        "temperature": 1.3,
        "top_k": 25,
        "top_p": 0.95,
        "prefix": PREFIX,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [4, 20],
        "bad_words_ids": [[21], [5, 22]],
        "eos_token_id": [EOS, 30],
        "min_length": 6,
        "max_length": 6,
        "forced_eos_token_id": [11, 12],
    },
}


@dataclasses.dataclass(frozen=True)
class Cells:
    """Expected and actual frequency of tokens, for one place of one combination."""

    name: str
    expected: NDArray[np.float64]  # probabilities, above 0 and below 1
    counts: NDArray[np.int64]  # of `DRAWS`

    @property
    def z(self) -> NDArray[np.float64]:
        """Deviation of each count, in standard deviations."""
        deviation = np.sqrt(DRAWS * self.expected * (1 - self.expected))
        return (self.counts - DRAWS * self.expected) / deviation

    @property
    def chi_square(self) -> float:
        """Chi-square of all counts, in standard deviations (Wilson and Hilferty)."""
        expected, freedom = DRAWS * self.expected, self.expected.size - 1
        statistic = ((self.counts - expected) ** 2 / expected).sum()
        share = 2 / (9 * freedom)
        return float(((statistic / freedom) ** (1 / 3) - (1 - share)) / np.sqrt(share))


class FirstToken(LogitsProcessor):
    """Begins row r with token r, so that the second step of transformers follows every first token."""

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] > self.prompt_len else torch.eye(VOCAB).log()


@torch.inference_mode()
def processed(pair: Pair, config: DecodeConfig, prefix: list[int]) -> Iterator[NDArray[np.float64]]:
    """Return the probabilities of the first and of the second new token, float64 [vocab + 1]; the last is no token."""
    settings = their_settings(config)
    prompt = torch.tensor([[settings.decoder_start_token_id, *prefix]])
    given: dict[str, Any] = {"decoder_input_ids": prompt} if prefix else {}
    ids = torch.tensor([SOURCE])
    out = pair.theirs.generate(input_ids=ids, generation_config=settings, **given)
    first = out.scores[0].double().softmax(1)[0].numpy()
    yield np.append(first, 0.0)
    if prefix:
        given["decoder_input_ids"] = prompt.repeat(VOCAB, 1)
    given["logits_processor"] = LogitsProcessorList([FirstToken(prompt.shape[1])])
    out = pair.theirs.generate(input_ids=ids.repeat(VOCAB, 1), generation_config=settings, **given)
    second = out.scores[1].double().softmax(1).numpy()
    ends = np.isin(np.arange(VOCAB), config.ends(EOS))
    yield np.append((first * ~ends) @ second, first[ends].sum())


def drawn(pair: Pair, config: DecodeConfig, prefix: list[int]) -> Iterator[NDArray[np.int64]]:
    """Return how often each token came first and second, int64 [vocab + 1]."""
    found = decode(pair.session, [SOURCE] * DRAWS, config, prefixes=[prefix] * DRAWS, batch_size=DRAWS)
    texts = np.array([[*sample.token_ids[len(prefix) :], ENDED][:2] for (sample,) in found])
    for column in texts.T:
        yield np.bincount(column, minlength=VOCAB + 1)


def cells_of(name: str, expected: NDArray[np.float64], counts: NDArray[np.int64]) -> Cells | None:
    """Combine rare tokens; return None for a certain token. Impossible tokens must not occur."""
    assert counts[expected == 0].sum() == 0, f"{name}: something impossible was drawn"
    is_rare = DRAWS * expected < LEAST
    cells = [np.append(values[~is_rare], values[is_rare].sum()) for values in (expected, counts)]
    if DRAWS * cells[0][-1] < LEAST:  # still too rare
        cells = [values[:-1] for values in cells]
    return Cells(name, *cells) if cells[0].size > 1 else None


def cells_of_all(names: Iterable[str]) -> list[Cells]:
    """Draw combinations with different seeds, because equal draws would deviate in the same way."""
    pair, all_cells = make_pair(), []
    for name in names:
        settings = {"max_new_tokens": 2, **COMBINATIONS[name]}
        if "max_length" in settings:
            del settings["max_new_tokens"]
        prefix = settings.pop("prefix", [])
        config = DecodeConfig.from_dict({**settings, "do_sample": True})
        counted = drawn(pair, dataclasses.replace(config, seed=list(COMBINATIONS).index(name)), prefix)
        for place, (expected, counts) in enumerate(zip(processed(pair, config, prefix), counted, strict=True), 1):
            all_cells.append(cells_of(f"{name}, token {place}", expected, counts))
    return [cells for cells in all_cells if cells]


def test_all_options_are_combined() -> None:
    fields = {field.name for field in dataclasses.fields(DecodeConfig)}
    of_others = {
        "num_beams",
        "length_penalty",
        "early_stopping",
        "num_return_sequences",
        "return_alternatives",
        "return_scores",
    }
    of_text = {"max_time", "stop_strings", "prefix_bias_beta", "replace_unknowns", "seed", "prompt_lookup_num_tokens"}
    of_speech = {"language", "task", "return_timestamps", "max_initial_timestamp_index"}
    combined = {name for options in COMBINATIONS.values() for name in options}
    assert combined == fields - of_others - of_text - of_speech - {"do_sample"} | {"prefix"}


@pytest.mark.parametrize(
    "names",
    [
        ["sharp, few, nucleus", "forced first", "another start", "all"],
        pytest.param(list(COMBINATIONS), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_tokens_come_as_often_as_expected(names: list[str]) -> None:
    """Some of many cells exceed 3 deviations by chance, so one seed in 100 may exceed each bound."""
    all_cells = cells_of_all(names)
    z = np.concatenate([cells.z for cells in all_cells])
    bound = -NormalDist().inv_cdf(0.01 / 2 / z.size)
    assert {cells.name for cells in all_cells if abs(cells.z).max() > bound} == set()
    expected, beyond = z.size * 2 * NormalDist().cdf(-3), int((abs(z) > 3).sum())
    assert beyond <= expected + 3 * np.sqrt(expected)
    bound = -NormalDist().inv_cdf(0.01 / len(all_cells))
    assert {cells.name: cells.chi_square for cells in all_cells if cells.chi_square > bound} == {}
