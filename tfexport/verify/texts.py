"""Whole decodes of a stage beside those of the eager model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfexport.config import DecodeConfig
from tfexport.decode.batch import decode
from tfexport.decode.result import Hypothesis
from tfexport.runtime.session import Session
from tfexport.spec import ModelSpec
from tfexport.verify.numbers import pad
from tfexport.verify.report import Decodes

NEW_TOKENS = 12
METHODS = {"greedy": 1, "beam 4": 4}
Sources = Sequence[Sequence[int]]
Tokens = tuple[int, ...]


def decode_best(session: Session[Any], sources: Sources, num_beams: int, batch_size: int) -> list[Hypothesis]:
    """Decode the best hypothesis of every source, at most 12 tokens long."""
    limit = min(NEW_TOKENS, session.spec.max_target_length)
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=limit)
    return [best[0] for best in decode(session, sources, config, batch_size=batch_size)]


def compare_decodes(
    stage: str,
    method: str,
    eager: Session[Any],
    sources: Sources,
    expected: Sequence[Hypothesis],
    got: Sequence[Hypothesis],
    *,
    noise: float,
    must_be_exact: bool,
) -> Decodes:
    """Count equal, tied and different decodes.

    Args:
        stage: named in the result.
        method: named in the result.
        eager: the reference, asked for its margin where two decodes part.
        sources: that were decoded.
        expected: by the reference.
        got: by the stage.
        noise: worst error of a logit that was measured for the stage.
        must_be_exact: whether a difference fails.
    """
    exact = ties = 0
    first = None
    for number, (source, left, right) in enumerate(zip(sources, expected, got, strict=True)):
        if left.token_ids == right.token_ids:
            exact += 1
            continue
        margin = _margin(eager, source, left.token_ids, right.token_ids, greedy=method != "beam 4")
        # Two log-probabilities of equal length can each be off by twice the error of a logit.
        ties += abs(margin) <= 4 * noise
        first = first or _describe(number, left.token_ids, right.token_ids, margin)
    return Decodes(stage, method, len(sources), exact, ties, first, must_be_exact)


def _margin(eager: Session[Any], source: Sequence[int], left: Tokens, right: Tokens, *, greedy: bool) -> float:
    """Return by how much the eager model prefers `left`: in logits where they part, or in score for beams."""
    scores = []
    parting = next(i for i, (a, b) in enumerate(zip((*left, -1), (*right, -1), strict=False)) if a != b)
    for tokens in (left, right):
        log_probs = token_log_probs(eager, source, tokens)
        scores.append(log_probs[min(parting, len(tokens) - 1)] if greedy else log_probs.mean())
    return float(scores[0] - scores[1])


def token_log_probs(eager: Session[Any], source: Sequence[int], tokens: Tokens) -> Any:
    """Score given tokens with a session, float64 [target_len]."""
    spec: ModelSpec = eager.spec
    ids, mask = pad([source], spec.tokens.pad)
    state, token, found = eager.encode(ids, mask), spec.tokens.start, []
    for following in tokens:
        candidates = eager.step(state, np.array([[token]]), spec.vocab)
        position = int(np.flatnonzero(candidates.token_ids[0] == following)[0])
        found.append(float(candidates.logits[0, position]) - float(candidates.log_normalizer[0]))
        token = following
    return np.array(found)


def _describe(number: int, left: Tokens, right: Tokens, margin: float) -> str:
    step = next(i for i, (a, b) in enumerate(zip((*left, -1), (*right, -1), strict=False)) if a != b)
    token = [tokens[step] if step < len(tokens) else "end" for tokens in (left, right)]
    return f"sequence {number}, token {step}: {token[0]} became {token[1]}, eager margin {margin:.1e}"


def batch_mates(stage: str, session: Session[Any], sources: Sources, noise: float, eager: Session[Any]) -> Decodes:
    """Decode alone and in padded batches: the tokens must be the same."""
    alone = decode_best(session, sources, 1, 1)
    # Batches are sorted by length, so equal lengths would need no padding: a large batch holds all lengths.
    together = decode_best(session, sources, 1, 64)
    return compare_decodes(
        stage,
        "batch mates",
        eager,
        sources,
        alone,
        together,
        noise=noise,
        must_be_exact=session.spec.precision == "fp32",
    )
