"""Whole decodes of a stage beside those of the eager model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfexport.decode.offline import decode
from tfexport.decode.result import Hypothesis
from tfexport.decode.score import score
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session
from tfexport.verify.divergence import parting
from tfexport.verify.perturbed import PerturbedSession
from tfexport.verify.report import Decodes, Divergence

NEW_TOKENS = 12
METHODS = {"greedy": 1, "beam 4": 4}
PERTURBATIONS = 32
Sources = Sequence[Sequence[int]]
Tokens = tuple[int, ...]
# Decodes sources with a session, so many at a time.
Decode = Callable[[Session, Sources, int], list[Hypothesis]]


def _decode_best(session: Session, sources: Sources, batch_size: int, *, num_beams: int) -> list[Hypothesis]:
    return decode_best(session, sources, num_beams, batch_size)


def decode_best(session: Session, sources: Sources, num_beams: int, batch_size: int) -> list[Hypothesis]:
    """Decode the best hypothesis of every source, at most 12 tokens long."""
    limit = min(NEW_TOKENS, session.spec.max_target_length)
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=limit)
    return [best[0] for best in decode(session, sources, config, batch_size=batch_size)]


def compare_decodes(
    stage: str,
    method: str,
    eager: Session,
    sources: Sources,
    expected: Sequence[Hypothesis],
    got: Sequence[Hypothesis],
    *,
    num_beams: int,
    noise: float,
    must_be_exact: bool,
    divergence: Divergence | None = None,
    decode_as: Decode | None = None,
) -> Decodes:
    """Count equal, tied and different decodes.

    Args:
        stage: named in the result.
        method: named in the result.
        eager: the reference, asked whether it might have said the same.
        sources: that were decoded.
        expected: by the reference.
        got: by the stage.
        num_beams: that both searched with.
        noise: worst error of a logit that was measured for the stage.
        must_be_exact: whether a difference fails.
        divergence: where they part, for the result.
        decode_as: how both were decoded; None for greedy or beam search with everybody's defaults.
    """
    differing = [
        number
        for number, (left, right) in enumerate(zip(expected, got, strict=True))
        if left.token_ids != right.token_ids
    ]
    again = decode_as or functools.partial(_decode_best, num_beams=num_beams)
    tied = {n for n in differing if _might_say(eager, sources[n], got[n].token_ids, again, noise)}
    shown = [n for n in differing if n not in tied] or differing
    first = None
    if shown:
        left, right = expected[shown[0]].token_ids, got[shown[0]].token_ids
        first = _describe(shown[0], left, right, _margin(eager, sources[shown[0]], left, right, greedy=num_beams == 1))
    exact = len(sources) - len(differing)
    return Decodes(stage, method, len(sources), exact, len(tied), first, must_be_exact, divergence)


def _might_say(eager: Session, source: Sequence[int], tokens: Tokens, decode_as: Decode, noise: float) -> bool:
    """Say whether the eager model decodes to `tokens` when its logits are perturbed by twice `noise`."""
    perturbed = PerturbedSession(eager, 2 * noise, np.random.default_rng(0))
    return any(best.token_ids == tokens for best in decode_as(perturbed, [source] * PERTURBATIONS, PERTURBATIONS))


def _margin(eager: Session, source: Sequence[int], left: Tokens, right: Tokens, *, greedy: bool) -> float:
    """Return by how much the eager model prefers `left`: in logits where they part, or in score for beams."""
    scores = []
    step = parting(left, right)
    for tokens in (left, right):
        log_probs = token_log_probs(eager, source, tokens)
        scores.append(log_probs[min(step, len(tokens) - 1)] if greedy else log_probs.mean())
    return float(scores[0] - scores[1])


def token_log_probs(eager: Session, source: Sequence[int], tokens: Tokens) -> Any:
    """Score given tokens with a session, float64 [target_len]."""
    (scored,) = score(eager, [source], [tokens], add_eos=False)
    return np.array(scored.log_probs)


def _describe(number: int, left: Tokens, right: Tokens, margin: float) -> str:
    step = parting(left, right)
    token = [tokens[step] if step < len(tokens) else "end" for tokens in (left, right)]
    return f"sequence {number}, token {step}: {token[0]} became {token[1]}, eager margin {margin:.1e}"


def batch_invariance(stage: str, session: Session, sources: Sources, noise: float, eager: Session) -> Decodes:
    """Decode alone and in padded batches: the tokens must be the same."""
    alone = decode_best(session, sources, 1, 1)
    # Batches are sorted by length, so equal lengths would need no padding: a large batch holds all lengths.
    together = decode_best(session, sources, 1, 64)
    return compare_decodes(
        stage,
        "batch invariance",
        eager,
        sources,
        alone,
        together,
        num_beams=1,
        noise=noise,
        must_be_exact=session.accuracy == "fp32",
    )
