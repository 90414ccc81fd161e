"""Requests of all kinds in random order get the results of `generate`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.served import Outcomes, is_idle, serving, until
from tfexport.decode.result import Hypothesis
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.model.result import Result
from tfexport.serve.engine import Engine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_new_tokens": 3},
    {"max_length": 7},
    {"do_sample": True, "temperature": 1.3, "seed": 5, "num_return_sequences": 3},
    {"do_sample": True, "top_k": 4, "top_p": 0.8, "seed": 1},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.3, "early_stopping": True},
    {"num_beams": 2, "early_stopping": "never", "no_repeat_ngram_size": 2},
    {"return_alternatives": True, "num_return_sequences": 4},
    {"return_alternatives": True, "num_return_sequences": 2, "num_beams": 2},
    {"repetition_penalty": 1.4, "min_new_tokens": 4},
    {"encoder_no_repeat_ngram_size": 2, "suppress_tokens": (7, 9)},
    {"bad_words_ids": ((5,), (6, 8)), "max_time": 60.0},
    {"forced_bos_token_id": 6},
    {"begin_suppress_tokens": (5, 6, 7), "sequence_bias": (((5, 6), 4.0), ((8,), -2.0))},
    {"exponential_decay_length_penalty": (3, 1.2), "renormalize_logits": True, "num_beams": 2},
    {"do_sample": True, "top_k": 0, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    {"return_alternatives": True, "num_return_sequences": 2, "begin_suppress_tokens": (5, 6, 7, 8)},
    {"forced_eos_token_id": 5, "max_new_tokens": 5},
    {"eos_token_id": (2, 8), "num_beams": 2},
    {"eos_token_id": tuple(range(2, 40))},
)
ONLY_TEXTS: tuple[dict[str, Any], ...] = (
    {"stop_strings": ("-0", "1")},
    {"stop_strings": "2", "num_beams": 2},
    {"prefix": "20"},
    {"prefix": "19", "num_beams": 3},
    {"prefix": "1", "prefix_bias_beta": 0.4},
    {"prefix": "20", "prefix_bias_beta": 0.3, "num_beams": 2},
)
ONLY_IDS: tuple[dict[str, Any], ...] = (
    {"prefix": (5, 6)},
    {"prefix": (7,), "num_beams": 2},
    {"prefix": (5, 9, 4), "prefix_bias_beta": 0.4},
)
SLOTS, BUDGETS = (1, 2, 4, 7, 16, 32, 64), (1, 40, 128, 100_000)


@dataclass(frozen=True)
class Asked:
    source: str | tuple[int, ...]
    options: dict[str, Any]
    is_stream: bool

    @property
    def num_rows(self) -> int:
        beams, several = self.options.get("num_beams", 1), self.options.get("num_return_sequences", 1)
        return beams * (several if {"do_sample", "return_alternatives"} & self.options.keys() else 1)


def draw(model: Model, texts: list[str], count: int, rng: np.random.Generator) -> list[Asked]:
    asked, spec = [], model.spec
    for _ in range(count):
        is_text = bool(texts) and bool(rng.random() < 0.6)
        kinds = (*KINDS, *(ONLY_TEXTS if is_text else ONLY_IDS))
        options = kinds[rng.integers(len(kinds))]
        length = int(rng.integers(1, min(spec.max_source_length, 48)))
        ids = tuple(rng.integers(3, spec.source_vocab, length).tolist())
        can_stream = options.get("num_beams", 1) == options.get("num_return_sequences", 1) == 1
        is_stream = can_stream and bool(rng.random() < 0.5)
        asked.append(Asked(texts[rng.integers(len(texts))] if is_text else ids, options, is_stream))
    return asked


def alone(model: Model, one: Asked) -> list[Any]:
    options = {name: value for name, value in one.options.items() if name != "prefix"}
    prefixes = [one.options["prefix"]] if "prefix" in one.options else None
    if isinstance(one.source, str):
        return model.generate([one.source], prefixes=prefixes, **options)
    return model.generate_ids([one.source], prefixes=prefixes, **options)[0]


def same(found: list[Any], expected: list[Any]) -> bool:
    def results(answers: list[Any]) -> list[Any]:
        return [(one.token_ids, one.finish_reason, getattr(one, "text", None)) for one in answers]

    scores, others = ([one.score for one in answers] for answers in (found, expected))
    return results(found) == results(expected) and scores == pytest.approx(others, abs=1e-4)


async def ask(engine: Engine, one: Asked, rng: np.random.Generator) -> list[Result] | list[Hypothesis]:
    urgency, stream = {"priority": float(rng.integers(-2, 3)), "timeout_s": 3600.0}, one.is_stream
    if isinstance(one.source, str):
        generation = engine.submit(one.source, stream=stream, **urgency, **one.options)
        pieces = "".join([piece async for piece in generation]) if stream else None
        answers = await generation
        assert pieces is None or pieces == answers[0].text
        return answers
    by_id = engine.submit_ids(one.source, stream=stream, **urgency, **one.options)
    tokens = tuple([token async for token in by_id]) if stream else None
    hypotheses = await by_id
    assert tokens is None or tokens == hypotheses[0].token_ids
    return hypotheses


async def compare_all(
    bundle: Path, options: dict[str, Any], asked: list[Asked], expected: list[list[Any]], seed: int
) -> None:
    """Ask in a random order, at random times, and compare each answer with what it is alone."""
    rng = np.random.default_rng(seed)
    slots, budget = int(rng.choice(SLOTS)), int(rng.choice(BUDGETS))
    order = [number for number in rng.permutation(len(asked)) if asked[number].num_rows <= slots]
    observer = Outcomes()

    async def later(engine: Engine, number: int) -> list[Any]:
        await asyncio.sleep(float(rng.random()) * len(order) / 500)
        return await ask(engine, asked[number], rng)

    limits = {"max_waiting": 10_000, "max_waiting_tokens": 10**9, "stream_buffer": 1000}
    async with serving(
        bundle, observer, within_s=600, options=options, slots=slots, encoder_budget=budget, **limits
    ) as engine:
        found = await asyncio.gather(*(later(engine, number) for number in order))
        wrong = [asked[number] for number, one in zip(order, found, strict=True) if not same(one, expected[number])]
        assert not wrong, (slots, budget, wrong[:3])
        await until(lambda: is_idle(engine))
    assert observer.counts == {"ok": len(order)}


BACKENDS: dict[str, dict[str, Any]] = {
    "contrib": {"backend": "ort", "variant": "contrib"},
    "static": {"backend": "ort", "variant": "static"},
    "concat": {"backend": "ort", "variant": "concat"},
    "eager": {"backend": "eager"},
}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_texts_in_any_order(dates_bundle: Path, model: Model, texts: list[str], backend: str) -> None:
    asked = draw(model, texts, 60, np.random.default_rng(1))
    expected = [alone(model, one) for one in asked]
    await compare_all(dates_bundle, BACKENDS[backend], asked, expected, seed=3)


async def test_ids_in_any_order_of_a_model_that_ends_late(random_bundle: Path) -> None:
    model = load(random_bundle, threads=1)
    asked = draw(model, [], 40, np.random.default_rng(2))
    await compare_all(random_bundle, {}, asked, [alone(model, one) for one in asked], seed=4)
