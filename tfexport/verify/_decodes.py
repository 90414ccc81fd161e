"""Compare whole decodes of a stage with the eager model and with recorded texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np

from tfexport.decode.offline import decode
from tfexport.decode.request import num_speech_tokens
from tfexport.decode.result import Hypothesis
from tfexport.decode.score import score
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.nn.eager import Generate
from tfexport.runtime.session import Batch, Candidates, Floats, Ids, Session
from tfexport.runtime.shortlist import Shortlist
from tfexport.runtime.sources import Source, pad_sources
from tfexport.text.config import TextSample
from tfexport.text.tokenizer import Tokenizer
from tfexport.verify._numbers import Batch as NumberedBatch
from tfexport.verify._report import Decodes, Divergence

NEW_TOKENS, LOOP_TOKENS = 12, 32
METHODS = {"greedy": 1, "beam 4": 4}
_PERTURBATIONS = 32
# Extra candidates, whose order noise may change.
_SPARE = 8
Prefixes = Sequence[Sequence[int]]
Tokens = tuple[int, ...]


class Stage(NamedTuple):
    """A session to compare, and the largest measured error of its logits."""

    name: str
    session: Session
    noise: float

    @property
    def must_be_exact(self) -> bool:
        return self.session.accuracy == "fp32"


class Expected(NamedTuple):
    """A source and the tokens that the user's own code generates for it."""

    source: Source
    target_ids: Tokens


def decode_best(
    session: Session,
    sources: Sequence[Source],
    num_beams: int,
    batch_size: int,
    prefixes: Prefixes | None = None,
    *,
    return_scores: bool = False,
) -> list[Hypothesis]:
    """Decode at most 12 tokens of every source, or exactly 12 after `prefixes`."""
    limit = min(NEW_TOKENS, session.spec.max_target_length - num_speech_tokens(session.spec, DecodeConfig()))
    config = DecodeConfig(
        num_beams=num_beams,
        max_new_tokens=limit,
        min_new_tokens=limit if prefixes else 0,
        return_scores=return_scores,
    )
    return [best[0] for best in decode(session, sources, config, prefixes=prefixes, batch_size=batch_size)]


def compare_long_decodes(
    eager: Session, stages: Sequence[Stage], batches: Sequence[NumberedBatch], report: Callable[[str], None]
) -> list[Decodes]:
    """Decode the last tokens up to the length of each batch."""
    sources, prefixes, found = [], list[list[int]](), []
    for batch in batches:
        new = min(NEW_TOKENS, eager.spec.max_target_length)
        allowed = np.where(batch.target_ids == eager.spec.tokens.eos, eager.spec.tokens.start, batch.target_ids)
        sources.append(batch.first)
        begun = num_speech_tokens(eager.spec, DecodeConfig())
        prefixes.append(allowed[0, 1 : batch.target_ids.shape[1] - new - begun + 1].tolist())
    expected = decode_best(eager, sources, 1, 1, prefixes)
    for stage in stages:
        report(f"decoding up to the length limit: {stage.name}")
        got = decode_best(stage.session, sources, 1, 1, prefixes, return_scores=True)
        found.append(compare_decodes(stage, "full length", eager, sources, expected, got, prefixes=prefixes))
    return found


def compare_all_decodes(
    eager: Session, stages: Sequence[Stage], sources: Sequence[Source], report: Callable[[str], None]
) -> list[Decodes]:
    """Decode with every stage and method; then compare single sources with batches."""
    found = []
    for method, num_beams in METHODS.items():
        report(f"decoding {len(sources)} sequences, {method}: eager")
        expected = decode_best(eager, sources, num_beams, 8)
        for stage in stages:
            rows = stage.session.limits.rows
            if rows.is_below(num_beams):
                report(f"{stage.name} takes {rows.most} rows, too few for {method}")
                continue
            report(f"decoding {len(sources)} sequences, {method}: {stage.name}")
            got = decode_best(stage.session, sources, num_beams, 8)
            one = compare_decodes(stage, method, eager, sources, expected, got, num_beams=num_beams)
            if not stage.must_be_exact:
                one = replace(one, divergence=measure_divergence(eager, sources, expected, got))
            found.append(one)
    some = sources[: min(64, len(sources) // 2 + 1)]
    for stage in stages:
        report(f"decoding {len(some)} sequences alone and in batches: {stage.name}")
        alone = decode_best(stage.session, some, 1, 1)
        # Batches are sorted by length, and equal lengths need no padding: a large batch has all lengths.
        together = decode_best(stage.session, some, 1, 64)
        found.append(compare_decodes(stage, "batch invariance", eager, some, alone, together))
    return found


def compare_decodes(
    stage: Stage,
    method: str,
    eager: Session,
    sources: Sequence[Source],
    expected: Sequence[Hypothesis],
    got: Sequence[Hypothesis],
    *,
    num_beams: int = 1,
    prefixes: Prefixes | None = None,
) -> Decodes:
    """Count equal, tied and different decodes.

    In a tie, the eager model gives the same tokens with logits perturbed by twice the stage's error.
    """
    pairs = [(left.token_ids, right.token_ids) for left, right in zip(expected, got, strict=True)]
    differing = [number for number, (left, right) in enumerate(pairs) if left != right]
    perturbed, tied = _perturbed(eager, 2 * stage.noise), set()
    for number in differing:
        same = [sources[number]] * _PERTURBATIONS
        same_prefix = None if prefixes is None else [prefixes[number]] * _PERTURBATIONS
        found = decode_best(perturbed, same, num_beams, _PERTURBATIONS, same_prefix)
        if any(best.token_ids == pairs[number][1] for best in found):
            tied.add(number)
    first = None
    if shown := [number for number in differing if number not in tied] or differing:
        left, right = pairs[shown[0]]
        margin = _margin(eager, sources[shown[0]], left, right, is_greedy=num_beams == 1)
        first = f"sequence {shown[0]}, {_difference(left, right, 'end')}, eager margin {margin:.1e}"
    exact = len(sources) - len(differing)
    return Decodes(stage.name, method, len(sources), exact, len(tied), first, stage.must_be_exact)


def measure_divergence(
    eager: Session, sources: Sequence[Source], expected: Sequence[Hypothesis], got: Sequence[Hypothesis]
) -> Divergence:
    """Compute medians over the sequences that differ."""
    positions, margins = [], []
    for source, left, right in zip(sources, expected, got, strict=True):
        if left.token_ids != right.token_ids:
            position = _first_difference(left.token_ids, right.token_ids)
            prompt = [eager.spec.tokens.start, *left.token_ids[:position]]
            batch = eager.batch()
            batch.add(pad_sources(eager.spec.source, [source]), [prompt])
            best, second = batch.step(np.array(prompt[-1:]), 2).logits[0].tolist()
            positions.append(position)
            margins.append(best - second)
    if not positions:
        return Divergence(1, None, None)
    return Divergence(1 - len(positions) / len(sources), float(np.median(positions)), float(np.median(margins)))


def recorded_texts(stage: Stage, tokenizer: Tokenizer, eager: Session) -> Decodes:
    """Decode the recorded texts and compare them with the user's own code.

    Texts with tokens outside of their shortlists are left out. A different token is a tie if the eager model's
    log-probabilities of both tokens are equal within the error of the stage's logits, because the original may have
    computed in float64.
    """
    prefix_len = len(tokenizer.text.target_prefix)
    samples = [one for one in tokenizer.text.samples if _is_allowed(eager, one.source_ids, one.target_ids[prefix_len:])]
    results = [_decoded(stage.session, tokenizer, sample) for sample in samples]
    expected = [Expected(list(sample.source_ids), sample.target_ids) for sample in samples]
    return _compared(stage, "recorded texts", expected, results, eager)


def compare_own_loop(
    generate: Generate, eager: Session, stages: Sequence[Stage], sources: Sequence[Source]
) -> list[Decodes]:
    """Compare greedy decodes in padded batches with the user's own loop."""
    limit, found = min(LOOP_TOKENS, eager.spec.max_target_length), []
    expected = [Expected(source, tuple(generate(source, limit))) for source in sources]
    expected = [one for one in expected if _is_allowed(eager, one.source, one.target_ids)]
    sources = [one.source for one in expected]
    for stage in stages:
        results = decode(stage.session, sources, DecodeConfig(max_new_tokens=limit), batch_size=8)
        found.append(_compared(stage, "own loop", expected, [best[0].token_ids for best in results], eager))
    return found


def _is_allowed(eager: Session, source: Source, target_ids: Sequence[int]) -> bool:
    """Return whether the shortlist of a source has these tokens."""
    shortlist: Shortlist | None = getattr(eager, "shortlist", None)
    return shortlist is None or bool(shortlist.masks(pad_sources(eager.spec.source, [source]))[0][[*target_ids]].all())


def _compared(
    stage: Stage, method: str, samples: Sequence[Expected], results: Sequence[Tokens | str], eager: Session
) -> Decodes:
    ties, problems = 0, []
    for number, (sample, ids) in enumerate(zip(samples, results, strict=True)):
        if isinstance(ids, str):
            problems.append(f"text {number}: {ids}")
        elif ids != sample.target_ids:
            ties += _is_tie(eager, sample, ids, stage.noise)
            problems.append(f"text {number}, {_difference(sample.target_ids, ids, 'the end')}")
    exact, first = len(samples) - len(problems), problems[0] if problems else None
    return Decodes(stage.name, method, len(samples), exact, ties, first, stage.must_be_exact)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip_longest(left, right)) if a != b)


def _margin(eager: Session, source: Source, left: Tokens, right: Tokens, *, is_greedy: bool) -> float:
    """Return how much the eager model prefers `left`, in log-probabilities."""
    scores, step = [], _first_difference(left, right)
    for tokens in (left, right):
        log_probs = _log_probs(eager, source, tokens)
        scores.append(log_probs[min(step, len(tokens) - 1)] if is_greedy else float(np.mean(log_probs)))
    return scores[0] - scores[1]


def _log_probs(eager: Session, source: Source, tokens: Tokens) -> tuple[float, ...]:
    return score(eager, [source], [tokens], add_eos=False)[0].log_probs


def _difference(left: Tokens, right: Tokens, end: str) -> str:
    step = _first_difference(left, right)
    before, after = (str(tokens[step]) if step < len(tokens) else end for tokens in (left, right))
    return f"token {step}: {before} became {after}"


def _decoded(session: Session, tokenizer: Tokenizer, sample: TextSample) -> Tokens | str:
    """Decode one text to its recorded end, or return how ids or texts differ."""
    try:
        (source,) = tokenizer.encode([sample.text])
    except InputError as error:
        return str(error)
    if tuple(source) != sample.source_ids:
        return f"its ids are {source[:8]}, recorded were {list(sample.source_ids)[:8]}"
    if not sample.target_ids:
        return ()
    prefix = list(tokenizer.text.target_prefix)
    # One token more than recorded shows whether the text ends where it should.
    is_ended = tokenizer.text.is_ended(sample, session.spec.tokens.eos)
    limit = min(len(sample.target_ids) + is_ended, session.spec.max_target_length)
    config = DecodeConfig(max_new_tokens=limit - len(prefix))
    ids = decode(session, [source], config, prefixes=[prefix])[0][0].token_ids
    if ids == sample.target_ids and (text := tokenizer.decode(ids)) != sample.output:
        return f"{sample.output!r} became {text!r}"
    return ids


def _is_tie(eager: Session, sample: Expected, ids: Tokens, noise: float) -> bool:
    step = _first_difference(sample.target_ids, ids)
    if step >= min(len(sample.target_ids), len(ids)):
        return False
    pair = (ids, sample.target_ids)
    found, recorded = (_log_probs(eager, sample.source, tokens[: step + 1])[-1] for tokens in pair)
    return abs(found - recorded) <= 4 * noise


def _perturbed(eager: Session, noise: float) -> Session:
    """Return a session that adds random errors of up to `noise` to the logits."""

    def batch(width: int = 1) -> _PerturbedBatch:
        return _PerturbedBatch(eager.batch(width), noise, eager.spec.vocab)

    return cast(Session, SimpleNamespace(spec=eager.spec, accuracy=eager.accuracy, limits=eager.limits, batch=batch))


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
