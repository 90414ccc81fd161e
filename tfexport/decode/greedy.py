"""One token at a time: the best one, or one drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tfexport.decode.config import DecodeConfig
from tfexport.decode.request import Batch
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.rows import Rows, nothing_left
from tfexport.decode.sample import Sampler
from tfexport.runtime.session import Floats, Ids, Mask, S, Session


class Chosen(NamedTuple):
    """The tokens of one step.

    Attributes:
        rows: rows of the batch that are still running, in any order, int64 [running].
        token_ids: int64 [running].
        log_probs: float32 [running].
    """

    rows: Ids
    token_ids: Ids
    log_probs: Floats


def choose_tokens(session: Session[S], batch: Batch, config: DecodeConfig, *, ahead: bool = False) -> Iterator[Chosen]:
    """Decode a batch token by token; finished rows leave it.

    Args:
        session: any backend.
        batch: for sampling, each text num_return_sequences times.
        config: num_beams is 1.
        ahead: take many steps at once where nothing is drawn and the session can: their tokens come late.

    Yields:
        The tokens of each step, the end-of-sequence tokens included.

    Raises:
        BackendError: the model gave numbers that are none.
        InputError: the filters leave a row nothing to choose.
    """
    eos = session.spec.tokens.eos
    sampler = Sampler(config, batch, session.spec.vocab) if config.do_sample else None
    wanted = sampler.wanted if sampler else 1
    rows, running = Rows(session, batch, config), np.arange(len(batch.texts))
    while rows.num_new < batch.max_new_tokens:
        if ahead and not sampler:
            taken, chosen = rows.run_ahead(batch.max_new_tokens - rows.num_new)
            yield Chosen(np.tile(running, len(taken)), taken.ravel(), chosen.ravel())
        candidates, log_probs = rows.best(wanted, filter_logits=True)
        best = log_probs[:, 0].copy()  # a view would keep all candidates of the step
        # `in` a list is the fastest search of a few numbers.
        if -np.inf in best.tolist():
            raise nothing_left(int(rows.texts[best.argmin()]), rows.num_new)
        if sampler:
            columns, chosen = sampler.draw(running, log_probs)
            token_ids = candidates[np.arange(running.size), columns]
        else:
            token_ids, chosen = candidates[:, 0].copy(), best
        yield Chosen(running, token_ids, chosen)
        if eos in token_ids.tolist():
            kept = _close_up(token_ids == eos)
            if not kept.size:
                return
            rows.select(kept)
            running, token_ids = running[kept], token_ids[kept]
        rows.append(token_ids)


def _close_up(ends: Mask) -> Ids:
    """Return the rows that do not end, the last of them in the places of those that do, so that few caches move."""
    going = np.flatnonzero(~ends)
    kept = np.arange(going.size)
    kept[ends[: going.size]] = going[going >= going.size]
    return kept


def greedy_search(session: Session[S], batch: Batch, config: DecodeConfig) -> list[list[Hypothesis]]:
    """Decode a batch with the best token at every step, or with samples.

    Args:
        session: any backend.
        batch: one row a text.
        config: num_beams is 1.

    Returns:
        For each text one hypothesis, or its samples in the order of their number.

    Raises:
        BackendError: the model gave numbers that are none.
        InputError: the filters leave a text nothing to choose.
    """
    samples, eos = config.num_return_sequences, session.spec.tokens.eos
    repeated = batch.repeat(samples)
    rows, token_ids, log_probs = map(
        np.concatenate, zip(*choose_tokens(session, repeated, config, ahead=True), strict=True)
    )
    lengths = np.bincount(rows)
    new_ids = np.split(token_ids[rows.argsort(kind="stable")], lengths.cumsum()[:-1])
    totals = np.bincount(rows, log_probs)  # added up in float64, step after step
    hypotheses = [
        Hypothesis(
            token_ids=(*prompt[1:], *new.tolist()),
            score=log_prob / (batch.num_forced + new.size),
            log_prob=log_prob,
            finish_reason=finish_reason(int(new[-1]), eos),
        )
        for prompt, new, log_prob in zip(repeated.prompts.tolist(), new_ids, totals.tolist(), strict=True)
    ]
    return [hypotheses[start : start + samples] for start in range(0, len(hypotheses), samples)]
