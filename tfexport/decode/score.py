"""Compute the log-probability of each token of given targets."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tfexport._arguments import check_call
from tfexport.decode._search import is_broken
from tfexport.decode.loop import check_cancelled
from tfexport.decode.request import Pair, batches, check_pairs
from tfexport.errors import BackendError, InputError
from tfexport.runtime.session import Batch, Candidates, Ids, ScoresTokens, Session, close_up
from tfexport.runtime.sources import Source, pad_sources


@dataclass(frozen=True)
class Score:
    """The log-probability of a target for its source, without logits processors.

    Attributes:
        token_ids: the target, including the end token if `add_eos` is set.
        log_probs: natural log p of each token, given the source and the tokens before it.
        log_prob: sum of `log_probs`.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    log_prob: float


def score(
    session: Session,
    sources: Iterable[Source],
    targets: Iterable[Iterable[int]],
    *,
    prefixes: Iterable[Iterable[int]] | None = None,
    start: int | None = None,
    add_eos: bool = True,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> list[Score]:
    """Score every target for its source, with the arguments of `Model.score_ids`."""
    check_call("score", batch_size=batch_size, on_progress=on_progress, cancel=cancel, add_eos=add_eos)
    pairs = check_pairs(session, sources, targets, prefixes, start, add_eos=add_eos, subject="score")
    limits, vocab, batch = session.limits, session.spec.vocab, session.batch()
    if not isinstance(batch, ScoresTokens) and limits.candidates.is_below(vocab):
        raise InputError(
            f"score: backend {session.backend} returns the best {limits.candidates.most} of {vocab} tokens, not all; "
            f"use backend ort or eager{limits.candidates.for_more(vocab)}"
        )
    size = batch_size if limits.rows.most is None else min(batch_size, limits.rows.most)
    scores: dict[int, Score] = {}
    for some in batches(pairs, size, can_join=batch.can_join):
        for pair, log_probs in zip(some, _score_batch(session, some, cancel), strict=True):
            scores[pair.number] = Score(pair.target_ids, tuple(log_probs), math.fsum(log_probs))
        if on_progress:
            on_progress(len(some))
    return [scores[pair.number] for pair in pairs]


def _score_batch(session: Session, pairs: Sequence[Pair], cancel: threading.Event | None) -> list[list[float]]:
    check_cancelled(cancel)
    batch = session.batch()
    sources = pad_sources(session.spec.source, [pair.source for pair in pairs])
    batch.add(sources, [pair.prompt for pair in pairs])
    found: list[list[float]] = [[] for _ in pairs]
    live, newest = list(range(len(pairs))), np.array([pair.prompt[-1] for pair in pairs])
    for step in range(max(len(pair.target_ids) for pair in pairs)):
        check_cancelled(cancel)
        done = np.flatnonzero([len(pairs[number].target_ids) == step for number in live])
        if done.size:
            batch.remove(done)
            remaining = close_up(len(live), done)
            live, newest = [live[place] for place in remaining], newest[remaining]
        following = np.array([pairs[number].target_ids[step] for number in live])
        for number, log_prob in zip(live, _log_probs(session, batch, newest, following), strict=True):
            if math.isnan(log_prob):
                raise BackendError(
                    f"score: the model returned NaN or infinite logits for {pairs[number].name} at token {step + 1}; "
                    "check its weights, or export with --precision fp32",
                    indices=[pairs[number].number],
                )
            if log_prob == -math.inf and session.limits.end_ids is not None:
                raise InputError(
                    f"score: {pairs[number].name} has token {pairs[number].target_ids[step]}, which is not in the "
                    "shortlist of its source; use a bundle that was exported without --shortlist",
                    indices=[pairs[number].number],
                )
            found[number].append(log_prob)
        newest = following
    return found


def _log_probs(session: Session, batch: Batch, target_ids: Ids, next_ids: Ids) -> list[float]:
    """Read a token of every row; return log p of the next ones, NaN for broken rows."""
    if isinstance(batch, ScoresTokens):
        found = batch.score_step(target_ids, next_ids)
    else:
        every = batch.step(target_ids, session.spec.vocab)
        place = (every.token_ids == next_ids[:, None]).argmax(1)[:, None]
        found = Candidates(next_ids[:, None], np.take_along_axis(every.logits, place, 1), every.log_normalizer)
    log_probs, broken = found.log_probs[:, 0], is_broken(found)
    values: list[float] = (log_probs if broken is None else np.where(broken, np.nan, log_probs)).tolist()
    return values
