"""One token at a time: the best one, or one drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tfexport.config import DecodeConfig
from tfexport.decode.request import Batch
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.rows import Rows, nothing_left
from tfexport.decode.sample import Sampler
from tfexport.runtime.session import Floats, Ids, S, Session


@dataclass(frozen=True)
class Chosen:
    """The tokens of one step.

    Attributes:
        rows: rows of the batch that are still running, int64 [running].
        token_ids: int64 [running].
        log_probs: float32 [running].
    """

    rows: Ids
    token_ids: Ids
    log_probs: Floats


def choose_tokens(session: Session[S], batch: Batch, config: DecodeConfig) -> Iterator[Chosen]:
    """Decode a batch token by token; finished rows leave it.

    Args:
        session: any backend.
        batch: for sampling, each text num_return_sequences times.
        config: num_beams is 1.

    Yields:
        The tokens of each step, the end-of-sequence tokens included.

    Raises:
        BackendError: the model gave numbers that are none.
        InputError: the filters leave a row nothing to choose.
    """
    sampler = Sampler(config, batch, session.spec.vocab) if config.do_sample else None
    rows, running = Rows(session, batch, config), np.arange(len(batch.texts))
    while rows.num_new < batch.max_new_tokens:
        candidates, log_probs = rows.best(sampler.wanted if sampler else 1, filter_logits=True)
        stuck = np.flatnonzero(np.isneginf(log_probs[:, 0]))
        if stuck.size:
            raise nothing_left(int(rows.texts[stuck[0]]), rows.num_new)
        if sampler:
            columns, chosen = sampler.draw(running, log_probs)
        else:
            columns, chosen = np.zeros(running.size, np.int64), log_probs[:, 0]
        token_ids = candidates[np.arange(running.size), columns]
        yield Chosen(running, token_ids, chosen)
        going = np.flatnonzero(token_ids != session.spec.tokens.eos)
        if not going.size:
            return
        rows.follow(going, token_ids[going])
        running = running[going]


@dataclass
class _Written:
    token_ids: list[int]
    num_new: int
    log_prob: float = field(default=0.0)


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
    samples = config.num_return_sequences
    repeated = batch.repeat(samples)
    written = [_Written(prompt[1:], batch.num_forced) for prompt in repeated.prompts.tolist()]
    for step in choose_tokens(session, repeated, config):
        for row, token_id, log_prob in zip(step.rows, step.token_ids, step.log_probs, strict=True):
            written[row].token_ids.append(int(token_id))
            written[row].num_new += 1
            written[row].log_prob += float(log_prob)
    hypotheses = [
        Hypothesis(
            token_ids=tuple(row.token_ids),
            score=row.log_prob / row.num_new,
            log_prob=row.log_prob,
            finish_reason=finish_reason(row.token_ids[-1], session.spec.tokens.eos),
        )
        for row in written
    ]
    return [hypotheses[start : start + samples] for start in range(0, len(hypotheses), samples)]
