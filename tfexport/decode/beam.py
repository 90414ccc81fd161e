"""Beam search, hypothesis by hypothesis that of Hugging Face transformers 5 (`_beam_search`).

A place that no hypothesis fills has the score -inf where transformers writes
-1e9. A source leaves as soon as its result stands: transformers runs on until
all are done, but lets nothing in where a source is done, so that a result never
depends on the batch. Scores are float32.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import numpy as np

from tfexport.decode.config import DecodeConfig
from tfexport.decode.request import Batch
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.rows import Rows, nothing_left
from tfexport.runtime.session import Floats, Ids, Mask, S, Session


class Extensions(NamedTuple):
    """The best ways to lengthen the beams of each source by one token, best first.

    Attributes:
        rows: the row that is lengthened, int64 [batch, num].
        token_ids: with which token, int64 [batch, num].
        log_probs: Σ log p, float32 [batch, num].
    """

    rows: Ids
    token_ids: Ids
    log_probs: Floats

    def first(self, num: int) -> Extensions:
        """Return the `num` best of each source."""
        return Extensions(self.rows[:, :num], self.token_ids[:, :num], self.log_probs[:, :num])

    def select(self, kept: Ids) -> Extensions:
        """Return those of the sources `kept`, int64 [new_batch]."""
        return Extensions(self.rows[kept], self.token_ids[kept], self.log_probs[kept])


class Ended(NamedTuple):
    """A finished hypothesis.

    Attributes:
        token_ids: int64 [len], the start token first.
        log_prob: Σ log p.
        score: with the length penalty.
    """

    token_ids: Ids
    log_prob: float
    score: float


class Finished:
    """The num_beams best finished hypotheses of each source, best first.

    Attributes:
        worst: score of the last of them, float32 [batch]; -inf where there are fewer.
    """

    def __init__(self, batch: int, num_beams: int) -> None:
        """Begin with none."""
        self.worst: Floats = np.full(batch, -np.inf, np.float32)
        self._num_beams = num_beams
        self._ended: list[list[Ended]] = [[] for _ in range(batch)]

    def add(self, source: int, ended: Ended) -> None:
        """Keep a hypothesis if it is among the best; of equal ones the earlier goes first."""
        best = self._ended[source]
        insort(best, ended, key=lambda one: -one.score)
        if len(best) >= self._num_beams:
            del best[self._num_beams :]
            self.worst[source] = best[-1].score

    def select(self, kept: Ids) -> None:
        """Forget all sources but `kept`, int64 [new_batch]."""
        self.worst = self.worst[kept]
        self._ended = [self._ended[source] for source in kept.tolist()]

    def hypotheses(self, source: int, count: int, eos: int) -> list[Hypothesis]:
        """Return the `count` best of one source; fewer where there are no more."""
        return [
            Hypothesis(
                token_ids=tuple(ended.token_ids[1:].tolist()),
                score=ended.score,
                log_prob=ended.log_prob,
                finish_reason=finish_reason(int(ended.token_ids[-1]), eos),
            )
            for ended in self._ended[source][:count]
        ]


def beam_search(session: Session[S], batch: Batch, config: DecodeConfig) -> list[list[Hypothesis]]:
    """Search a batch for its best hypotheses.

    Args:
        session: any backend.
        batch: one row a text.
        config: do_sample is false.

    Returns:
        For each text its num_return_sequences best, best first; fewer only where
        the filters leave fewer.

    Raises:
        BackendError: the model gave numbers that are none.
        InputError: the filters leave a text nothing to choose.
    """
    eos, num_beams = session.spec.tokens.eos, config.num_beams
    results: list[list[Hypothesis]] = [[] for _ in batch.texts]
    rows, places = Rows(session, batch, config), np.arange(len(batch.texts))
    running = np.zeros((places.size, 1), np.float32)
    finished = Finished(places.size, num_beams)
    while places.size:
        token_ids, log_probs = rows.best(2 * num_beams, filter_logits=False)
        best = _extend(running, token_ids, log_probs, 2 * num_beams)
        at_limit = rows.num_new + 1 == batch.max_new_tokens
        ends = (best.token_ids == eos) | at_limit
        going = best
        if np.count_nonzero(ends):
            _finish(finished, rows, best, ends, config)
            going = _continue(best, ends)
        going = going.first(num_beams)
        closed = at_limit | _is_settled(finished, going, rows.num_new + 1, batch.max_new_tokens, config)
        if np.count_nonzero(closed):
            for source in np.flatnonzero(closed).tolist():
                found = finished.hypotheses(source, config.num_return_sequences, eos)
                if not found:
                    raise nothing_left(int(batch.texts[places[source]]), rows.num_new)
                results[places[source]] = found
            kept = np.flatnonzero(~closed)
            going, places = going.select(kept), places[kept]
            finished.select(kept)
        if places.size:
            rows.select(going.rows.ravel())
            rows.append(going.token_ids.ravel())
            running = going.log_probs
    return results


def _extend(running: Floats, token_ids: Ids, log_probs: Floats, num: int) -> Extensions:
    """Choose among the candidates of all beams of a source.

    Args:
        running: Σ log p of the beams, float32 [batch, beams].
        token_ids: int64 [batch · beams, num_candidates].
        log_probs: float32 [batch · beams, num_candidates].
        num: how many to choose.
    """
    totals = running.reshape(-1, 1) + log_probs
    by_source = totals.reshape(len(running), -1)
    # Equal ones keep their order: that of the beams, then that of the candidates.
    chosen = (-by_source).argsort(1, kind="stable")[:, :num]
    if len(running) > 1:
        chosen = chosen + np.arange(0, totals.size, by_source.shape[1])[:, None]
    return Extensions(chosen // token_ids.shape[1], token_ids.take(chosen), totals.take(chosen))


def _continue(best: Extensions, ends: Mask) -> Extensions:
    """Return the extensions that do not end, best first, and behind them those that do, with -inf."""
    sources, order = np.arange(len(ends))[:, None], ends.argsort(1, kind="stable")
    log_probs = np.where(ends, -np.inf, best.log_probs)
    return Extensions(best.rows[sources, order], best.token_ids[sources, order], log_probs[sources, order])


def _finish(finished: Finished, rows: Rows[S], best: Extensions, ends: Mask, config: DecodeConfig) -> None:
    """Keep what ends; of the 2 · num_beams extensions only the better half may, the others are spare beams."""
    scores = best.log_probs / (rows.num_new + 1) ** config.length_penalty
    better = ends & (scores > finished.worst[:, None])
    better[:, config.num_beams :] = False
    sequences = np.concatenate((rows.history[best.rows[better]], best.token_ids[better][:, None]), 1)
    sources, log_probs = better.nonzero()[0].tolist(), best.log_probs[better].tolist()
    for source, ids, log_prob, score in zip(sources, sequences, log_probs, scores[better].tolist(), strict=True):
        finished.add(source, Ended(ids, log_prob, score))


def _is_settled(finished: Finished, going: Extensions, num_new: int, max_new_tokens: int, config: DecodeConfig) -> Mask:
    """Say for which sources no running beam is expected to change the result, bool [batch].

    The expectation is a heuristic unless `early_stopping` is "never": it judges
    the best beam as if it ended now.
    """
    hopeful = config.early_stopping == "never" and config.length_penalty > 0
    length = max_new_tokens if hopeful else num_new
    attainable = going.log_probs[:, 0] / length**config.length_penalty
    settled: Mask = attainable <= finished.worst
    return settled | (finished.worst > -np.inf) if config.early_stopping is True else settled
