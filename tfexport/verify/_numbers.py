"""Compare numbers of a stage with the eager model's on random batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.runtime.session import Floats, Ids, Session, Verifies
from tfexport.runtime.sources import Source, Sources, pad_sources, random_source
from tfexport.verify._report import Numbers

LONGEST_SOURCE, LONGEST_TARGET = 48, 24
# Beyond them, single rows have these lengths, and those of the model's limits.
LONG = (64, 128, 256, 512, 1024)
LONG_STEPS = 16  # last tokens of a long target, read one by one
# Tokens verified in one step; the last piece of a target has fewer.
PIECE = 5


class Batch(NamedTuple):
    """Random sequences of mixed lengths, padded on the right."""

    sources: Sources
    first: Source  # of the first row
    target_ids: Ids  # decoder inputs, the start token first
    prefill: int  # target tokens in the first step


def random_sources(spec: ModelSpec, count: int, rng: np.random.Generator) -> list[Source]:
    """Draw sources of up to 48 positions or the model's limit."""
    longest = min(LONGEST_SOURCE, spec.max_source_length)
    return [random_source(spec.source, rng, int(rng.integers(1, longest + 1))) for _ in range(count)]


def random_batches(spec: ModelSpec, count: int, rng: np.random.Generator, max_rows: int | None = None) -> list[Batch]:
    """Draw `count` sequences in batches of at most 8 rows, the largest first."""
    batches: list[Batch] = []
    longest = min(LONGEST_TARGET, spec.max_target_length) if spec.has_decoder else 1
    while count > 0:
        size = min(count, int(rng.integers(1, 9)) if batches else 8, max_rows or 8)
        values = random_sources(spec, size, rng)
        target_len = int(rng.integers(1, longest + 1)) if batches else longest
        target = rng.integers(0, max(spec.vocab, 1), (size, target_len))
        target[:, 0] = spec.tokens.start
        prefill = int(rng.integers(1, target_len + 1)) if batches else min(2, target_len)
        batches.append(Batch(pad_sources(spec.source, values), values[0], target, prefill))
        count -= size
    return batches


def long_lengths(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return source and target lengths up to the limits, at most 1,024 tokens."""
    source, target = (min(limit, LONG[-1]) for limit in (spec.max_source_length, spec.max_target_length))
    lengths = [length for length in LONG if length < max(source, target)]
    return [(min(length, source), min(length, target)) for length in (*lengths, max(source, target))]


def long_batches(spec: ModelSpec, rng: np.random.Generator) -> list[Batch]:
    """Draw one row for each of `long_lengths`; the first step reads most of it."""
    batches = []
    for source_len, target_len in long_lengths(spec):
        source = random_source(spec.source, rng, source_len)
        target = rng.integers(0, max(spec.vocab, 1), (1, max(target_len, 1)))
        target[:, 0] = spec.tokens.start
        prefill = max(target_len - LONG_STEPS, min(2, target_len))
        batches.append(Batch(pad_sources(spec.source, [source]), source, target, prefill))
    return batches


def step_logits(session: Session, batch: Batch, expected: Floats) -> Floats:
    """Feed the target to a session: a prefix with the sources, then token by token.

    Return the logits after the prefix and each later token, [batch, target_len - prefill + 1, vocab]. Those that are
    not among the session's candidates count as `expected`, or as the last candidate's if that is less. Those of tokens
    that a shortlist excludes are 0.
    """
    running, steps, vocab = session.batch(), [], session.spec.vocab
    num_candidates = min(session.limits.candidates.most or vocab, vocab)
    running.add(batch.sources, batch.target_ids[:, : batch.prefill].tolist())
    for position in range(batch.prefill - 1, batch.target_ids.shape[1]):
        candidates = running.step(batch.target_ids[:, position], num_candidates)
        logits = np.minimum(expected[:, position + 1 - batch.prefill], candidates.logits[:, -1:])
        np.put_along_axis(logits, candidates.token_ids, candidates.logits, 1)
        logits[logits == -np.inf] = 0
        steps.append(logits)
    return np.stack(steps, 1)


def verified_logits(session: Session, batch: Batch) -> Floats:
    """Return `step_logits`, verified in pieces, each after wrong tokens."""
    first, rows = batch.prefill - 1, len(batch.sources)
    found = np.empty((rows, batch.target_ids.shape[1] - first, session.spec.vocab), np.float32)
    for row, target in enumerate(batch.target_ids):
        running = session.batch()
        running.add(batch.sources.take(np.array([row])), [target[: batch.prefill].tolist()])
        verifier = cast(Verifies, running)
        for begin in range(first, target.size, PIECE):
            piece = target[begin : begin + PIECE]
            verifier.verify(np.roll(piece, 1), 1)
            verifier.rewind(begin)
            candidates = verifier.verify(piece, session.spec.vocab)
            places = found[row, begin - first : begin - first + piece.size]
            np.put_along_axis(places, candidates.token_ids, candidates.logits, 1)
    return found


def compare(
    stage: str, expected: Sequence[Floats], got: Sequence[Floats], tolerance: float, quantity: str = "logits"
) -> Numbers:
    """Find the largest difference between arrays, one per batch; NaN is largest."""
    worst, place = -1.0, ""
    scale = max(float(np.abs(array).max()) for array in expected) or 1.0  # a model may return only zeros
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        difference = np.abs(left - right)
        index = np.unravel_index(int(np.argmax(difference)), difference.shape)  # argmax stops at the first NaN
        largest = float(difference[index])
        if not largest <= worst:
            worst, place = largest, f"batch {number}, row {index[0]}, position {index[1]}, entry {index[2]}"
        if math.isnan(worst):
            break
    return Numbers(stage, worst / scale, worst, tolerance, place, quantity)
