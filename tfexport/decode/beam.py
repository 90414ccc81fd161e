"""Beam search, hypothesis by hypothesis that of Hugging Face transformers 5 (`_beam_search`).

A place that no hypothesis fills has the score -inf where transformers writes
-1e9. A source leaves as soon as its result stands: transformers runs on until
all are done, but lets nothing in where a source is done, so that a result never
depends on the batch. Scores are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfexport.config import DecodeConfig
from tfexport.decode.request import Batch
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.rows import Rows, nothing_left
from tfexport.runtime.session import Floats, Ids, Mask, S, Session


@dataclass(frozen=True)
class Extensions:
    """The best ways to lengthen the beams of each source by one token, best first.

    Attributes:
        beams: which beam is lengthened, int64 [batch, num].
        token_ids: with which token, int64 [batch, num].
        log_probs: Σ log p, float32 [batch, num].
    """

    beams: Ids
    token_ids: Ids
    log_probs: Floats

    def take(self, order: Ids) -> Extensions:
        """Return those at `order`, int64 [batch, n]."""
        rows = np.arange(len(order))[:, None]
        return Extensions(self.beams[rows, order], self.token_ids[rows, order], self.log_probs[rows, order])

    def select(self, kept: Ids) -> Extensions:
        """Return those of the sources `kept`."""
        return Extensions(self.beams[kept], self.token_ids[kept], self.log_probs[kept])


@dataclass(frozen=True)
class Finished:
    """The best finished hypotheses of each source, best first.

    Attributes:
        token_ids: int64 [batch, num_beams, len], the start token first, of any value behind the end.
        lengths: tokens of each, int64 [batch, num_beams].
        log_probs: Σ log p, float32 [batch, num_beams].
        scores: with the length penalty, float32 [batch, num_beams]; -inf is an empty place.
    """

    token_ids: Ids
    lengths: Ids
    log_probs: Floats
    scores: Floats

    @classmethod
    def none(cls, batch: int, num_beams: int) -> Finished:
        """Return empty places only."""
        empty = np.full((batch, num_beams), -np.inf, np.float32)
        return cls(np.zeros((batch, num_beams, 0), np.int64), np.zeros((batch, num_beams), np.int64), empty, empty)

    def add(self, token_ids: Ids, log_probs: Floats, scores: Floats) -> Finished:
        """Return the best of these and of newly finished ones, which are all equally long; -inf scores are no one."""
        if np.isneginf(scores).all():
            return self
        (batch, num_beams), length = self.lengths.shape, token_ids.shape[2]
        widened = np.pad(self.token_ids, ((0, 0), (0, 0), (0, length - self.token_ids.shape[2])))
        lengths = np.concatenate((self.lengths, np.full(scores.shape, length)), 1)
        scores = np.concatenate((self.scores, scores), 1)
        order = _descending(scores)[:, :num_beams]
        return Finished(
            token_ids=np.concatenate((widened, token_ids), 1)[np.arange(batch)[:, None], order],
            lengths=np.take_along_axis(lengths, order, 1),
            log_probs=np.take_along_axis(np.concatenate((self.log_probs, log_probs), 1), order, 1),
            scores=np.take_along_axis(scores, order, 1),
        )

    def select(self, kept: Ids) -> Finished:
        """Return those of the sources `kept`."""
        return Finished(self.token_ids[kept], self.lengths[kept], self.log_probs[kept], self.scores[kept])

    def hypotheses(self, source: int, count: int, eos: int) -> list[Hypothesis]:
        """Return the `count` best of one source; fewer where there are no more."""
        found = []
        for place in range(count):
            if np.isneginf(self.scores[source, place]):
                break
            token_ids = tuple(self.token_ids[source, place, 1 : self.lengths[source, place]].tolist())
            found.append(
                Hypothesis(
                    token_ids=token_ids,
                    score=float(self.scores[source, place]),
                    log_prob=float(self.log_probs[source, place]),
                    finish_reason=finish_reason(token_ids[-1], eos),
                )
            )
        return found


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
    finished = Finished.none(places.size, num_beams)
    while places.size:
        token_ids, log_probs = rows.best(2 * num_beams, filter_logits=False)
        best = _extend(running, token_ids, log_probs, 2 * num_beams)
        at_limit = rows.num_new + 1 == batch.max_new_tokens
        ends = (best.token_ids == eos) | at_limit
        finished = _finish(finished, rows, best, ends, config)
        going = _continue(best, ends, num_beams)
        closed = at_limit | _is_settled(finished, going, rows.num_new + 1, batch.max_new_tokens, config)
        for source in np.flatnonzero(closed).tolist():
            found = finished.hypotheses(source, config.num_return_sequences, eos)
            if not found:
                raise nothing_left(int(batch.texts[places[source]]), rows.num_new)
            results[places[source]] = found
        kept = np.flatnonzero(~closed)
        if kept.size:
            going, finished, places = going.select(kept), finished.select(kept), places[kept]
            rows.follow((kept[:, None] * running.shape[1] + going.beams).ravel(), going.token_ids.ravel())
            running = going.log_probs
        else:
            break
    return results


def _extend(running: Floats, token_ids: Ids, log_probs: Floats, num: int) -> Extensions:
    """Choose among the candidates of all beams of a source.

    Args:
        running: Σ log p of the beams, float32 [batch, beams].
        token_ids: int64 [batch · beams, num_candidates].
        log_probs: float32 [batch · beams, num_candidates].
        num: how many to choose.
    """
    batch, beams = running.shape
    totals = (running[:, :, None] + log_probs.reshape(batch, beams, -1)).reshape(batch, -1)
    everything = Extensions(
        beams=np.broadcast_to(np.arange(totals.shape[1]) // token_ids.shape[1], totals.shape),
        token_ids=token_ids.reshape(batch, -1),
        log_probs=totals,
    )
    return everything.take(_descending(totals)[:, :num])


def _continue(best: Extensions, ends: Mask, num_beams: int) -> Extensions:
    """Choose the beams of the next step: the best extensions that do not end."""
    log_probs = np.where(ends, -np.inf, best.log_probs)
    order = _descending(log_probs)[:, :num_beams]
    return Extensions(best.beams, best.token_ids, log_probs).take(order)


def _finish(finished: Finished, rows: Rows[S], best: Extensions, ends: Mask, config: DecodeConfig) -> Finished:
    """Add what ends; of the 2 · num_beams extensions only the better half may, the others are spare beams."""
    first = np.s_[:, : config.num_beams]
    beams, token_ids, log_probs = best.beams[first], best.token_ids[first], best.log_probs[first]
    history = rows.history.reshape(len(beams), -1, rows.history.shape[1])
    sequences = np.concatenate((history[np.arange(len(beams))[:, None], beams], token_ids[:, :, None]), 2)
    penalised = log_probs / (rows.num_new + 1) ** config.length_penalty
    return finished.add(sequences, log_probs, np.where(ends[first], penalised, -np.inf))


def _is_settled(finished: Finished, going: Extensions, num_new: int, max_new_tokens: int, config: DecodeConfig) -> Mask:
    """Say for which sources no running beam is expected to change the result, bool [batch].

    The expectation is a heuristic unless `early_stopping` is "never": it judges
    the best beam as if it ended now.
    """
    hopeful = config.early_stopping == "never" and config.length_penalty > 0
    length = max_new_tokens if hopeful else num_new
    attainable = going.log_probs[:, 0] / length**config.length_penalty
    worst = finished.scores.min(1)
    settled: Mask = attainable <= worst
    return settled | ~np.isneginf(worst) if config.early_stopping is True else settled


def _descending(scores: Floats) -> Ids:
    """Return the order of the columns from the highest score, equal ones as they stand."""
    return np.argsort(-scores, axis=1, kind="stable")
