"""Compare whole decodes of a stage with the eager model and with recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from tfexport.decode.offline import decode
from tfexport.decode.result import Hypothesis
from tfexport.decode.score import score
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Batch, Candidates, Floats, Ids, Mask, Session, pad_right
from tfexport.text.config import TextSample
from tfexport.text.tokenizer import Tokenizer
from tfexport.verify._report import Decodes, Divergence

NEW_TOKENS = 12
METHODS = {"greedy": 1, "beam 4": 4}
RECORDED = "recorded texts"
_PERTURBATIONS = 32
# Extra candidates, whose order noise may change.
_SPARE = 8
_BATCH = 8
Sources = Sequence[Sequence[int]]
Tokens = tuple[int, ...]


def decode_best(session: Session, sources: Sources, num_beams: int, batch_size: int) -> list[Hypothesis]:
    """Decode the best hypothesis of every source, at most 12 tokens long."""
    limit = min(NEW_TOKENS, session.spec.max_target_length)
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=limit)
    return [best[0] for best in decode(session, sources, config, batch_size=batch_size)]


def parting(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the position of the first different token; one text may be a prefix."""
    return next(i for i, (a, b) in enumerate(zip_longest(left, right)) if a != b)


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
) -> Decodes:
    """Count equal, tied and different decodes.

    A difference is a tie if the eager model produces the same tokens with its logits perturbed by twice `noise`, the
    largest measured error of the stage's logits.
    """
    pairs = [(left.token_ids, right.token_ids) for left, right in zip(expected, got, strict=True)]
    differing = [number for number, (left, right) in enumerate(pairs) if left != right]
    perturbed = _PerturbedSession(eager, 2 * noise)
    tied = {number for number in differing if _may_decode_to(perturbed, sources[number], pairs[number][1], num_beams)}
    first = None
    if shown := [number for number in differing if number not in tied] or differing:
        left, right = pairs[shown[0]]
        margin = _margin(eager, sources[shown[0]], left, right, is_greedy=num_beams == 1)
        first = f"sequence {shown[0]}, {_difference(left, right, 'end')}, eager margin {margin:.1e}"
    exact = len(sources) - len(differing)
    return Decodes(stage, method, len(sources), exact, len(tied), first, must_be_exact)


def batch_invariance(stage: str, session: Session, sources: Sources, noise: float, eager: Session) -> Decodes:
    """Compare decodes of single sources with those of padded batches."""
    alone = decode_best(session, sources, 1, 1)
    # Batches are sorted by length, and equal lengths need no padding: a large batch has all lengths.
    together = decode_best(session, sources, 1, 64)
    is_exact, triple = session.accuracy == "fp32", (sources, alone, together)
    return compare_decodes(stage, "batch invariance", eager, *triple, num_beams=1, noise=noise, must_be_exact=is_exact)


def measure_divergence(
    reference: Session, sources: Sources, expected: Sequence[Hypothesis], got: Sequence[Hypothesis]
) -> Divergence:
    """Compute medians over the sequences that differ."""
    parted = [
        (source, left.token_ids, parting(left.token_ids, right.token_ids))
        for source, left, right in zip(sources, expected, got, strict=True)
        if left.token_ids != right.token_ids
    ]
    equal = 1 - len(parted) / len(sources)
    if not parted:
        return Divergence(equal, None, None)
    pieces = [parted[first : first + _BATCH] for first in range(0, len(parted), _BATCH)]
    margins = [margin for piece in pieces for margin in _margins(reference, piece)]
    return Divergence(equal, float(np.median([position for *_, position in parted])), float(np.median(margins)))


def recorded_texts(stage: str, session: Session, tokenizer: Tokenizer, eager: Session, noise: float) -> Decodes:
    """Decode the recorded texts and compare them with the user's own code.

    If a text has no recorded target ids, only its source ids are compared. A different token is a tie if the eager
    model's log-probabilities of both tokens are equal within the error of the stage's logits, because the original may
    have computed in float64.
    """
    samples = tokenizer.text.samples
    ties, problems = 0, []
    for number, sample in enumerate(samples):
        ids = _decoded(session, tokenizer, sample)
        if isinstance(ids, str):
            problems.append(f"text {number}: {ids}")
        elif ids != sample.target_ids:
            ties += _is_tie(eager, sample, ids, noise)
            problems.append(f"text {number}, {_difference(sample.target_ids, ids, 'the end')}")
        elif ids and (text := tokenizer.decode(ids)) != sample.output:
            problems.append(f"text {number}: {sample.output!r} became {text!r}")
    exact, first = len(samples) - len(problems), problems[0] if problems else None
    return Decodes(stage, RECORDED, len(samples), exact, ties, first, must_be_exact=session.accuracy == "fp32")


def _may_decode_to(perturbed: Session, source: Sequence[int], tokens: Tokens, num_beams: int) -> bool:
    found = decode_best(perturbed, [source] * _PERTURBATIONS, num_beams, _PERTURBATIONS)
    return any(best.token_ids == tokens for best in found)


def _margin(eager: Session, source: Sequence[int], left: Tokens, right: Tokens, *, is_greedy: bool) -> float:
    """Return how much the eager model prefers `left`, in log-probabilities."""
    scores, step = [], parting(left, right)
    for tokens in (left, right):
        log_probs = _log_probs(eager, source, tokens)
        scores.append(log_probs[min(step, len(tokens) - 1)] if is_greedy else log_probs.mean())
    return float(scores[0] - scores[1])


def _log_probs(eager: Session, source: Sequence[int], tokens: Tokens) -> NDArray[np.float64]:
    (scored,) = score(eager, [source], [tokens], add_eos=False)
    return np.array(scored.log_probs)


def _difference(left: Tokens, right: Tokens, end: str) -> str:
    step = parting(left, right)
    before, after = (str(tokens[step]) if step < len(tokens) else end for tokens in (left, right))
    return f"token {step}: {before} became {after}"


def _margins(reference: Session, parted: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[float]:
    """Return the difference of the two best logits of each text at the given position."""
    tokens = reference.spec.tokens
    batch = reference.batch()
    batch.add(*pad_right([source for source, *_ in parted], tokens.pad), [[tokens.start]] * len(parted))
    margins: Floats = np.zeros(len(parted), np.float32)
    fed = np.full(len(parted), tokens.start)
    for step in range(max(position for *_, position in parted) + 1):
        logits = batch.step(fed, 2).logits
        here = np.array([position == step for *_, position in parted])
        margins[here] = logits[here, 0] - logits[here, 1]
        fed = np.array([text[step] if step < len(text) else tokens.pad for _, text, _ in parted])
    return [float(margin) for margin in margins]


def _decoded(session: Session, tokenizer: Tokenizer, sample: TextSample) -> Tokens | str:
    """Decode one text to its recorded length, or return how its source ids differ."""
    try:
        (source,) = tokenizer.encode([sample.text])
    except InputError as error:
        return str(error)
    if tuple(source) != sample.source_ids:
        return f"its ids are {source[:8]}, recorded were {list(sample.source_ids)[:8]}"
    if not sample.target_ids:
        return ()
    prefix = list(tokenizer.text.target_prefix)
    config = DecodeConfig(max_new_tokens=len(sample.target_ids) - len(prefix))
    return decode(session, [source], config, prefixes=[prefix])[0][0].token_ids


def _is_tie(eager: Session, sample: TextSample, ids: Tokens, noise: float) -> bool:
    step = parting(sample.target_ids, ids)
    if step >= min(len(sample.target_ids), len(ids)):
        return False
    pair = (ids, sample.target_ids)
    found, recorded = (_log_probs(eager, sample.source_ids, tokens[: step + 1])[-1] for tokens in pair)
    return bool(abs(found - recorded) <= 4 * noise)


class _PerturbedSession:
    """Add random errors of up to `noise` to the logits, different in every row."""

    backend = "perturbed"

    def __init__(self, inner: Session, noise: float) -> None:
        self.spec, self.accuracy, self.limits = inner.spec, inner.accuracy, inner.limits
        self._inner, self._noise = inner, noise

    def batch(self, width: int = 1) -> _PerturbedBatch:
        return _PerturbedBatch(self._inner.batch(width), self._noise, self.spec.vocab)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        return self._inner.hidden_states(source_ids, source_mask)

    def close(self) -> None:
        pass


class _PerturbedBatch:
    def __init__(self, inner: Batch, noise: float, vocab: int) -> None:
        self.width, self.can_join = inner.width, inner.can_join
        self.add, self.reorder, self.remove = inner.add, inner.reorder, inner.remove
        self._inner, self._noise, self._vocab, self._rng = inner, noise, vocab, np.random.default_rng(0)

    @property
    def lengths(self) -> Ids:
        return self._inner.lengths

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        found = self._inner.step(target_ids, min(num_candidates + _SPARE, self._vocab))
        change = self._rng.uniform(-self._noise, self._noise, found.logits.shape)
        logits: Floats = found.logits + change.astype(np.float32)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
        ids: Ids = np.take_along_axis(found.token_ids, order, 1)
        return Candidates(ids, np.take_along_axis(logits, order, 1), found.log_normalizer)
