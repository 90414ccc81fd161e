"""Pairs of a source and a target that is given: checked, and divided into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tfexport.decode.request import check_pairs
from tfexport.runtime.session import Session


@dataclass(frozen=True)
class Pair:
    """A target that is given.

    Attributes:
        number: its place in the call.
        source_ids: of the source, at least one token.
        prompt: start token and prefix: what the decoder reads first.
        target_ids: what stands behind it, at least one token.
    """

    number: int
    source_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    target_ids: tuple[int, ...]


def checked_pairs(
    session: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    prefixes: Sequence[Sequence[int]] | None,
    start: int | None,
    *,
    add_eos: bool,
    subject: str,
) -> list[Pair]:
    """Check everything that is asked, and end each target with `add_eos`; see `check_pairs`."""
    tokens = session.spec.tokens
    check_pairs(session, sources, targets, prefixes, start, add_eos=add_eos, subject=subject)
    pairs = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        prompt = (tokens.start if start is None else start, *map(int, prefixes[number] if prefixes else ()))
        ended = add_eos and (len(target) == 0 or target[-1] != tokens.eos)
        target_ids = (*map(int, target), *([tokens.eos] if ended else ()))
        pairs.append(Pair(number, tuple(map(int, source)), prompt, target_ids))
    return pairs


def batches(pairs: Sequence[Pair], size: int, *, can_join: bool) -> Iterator[Sequence[Pair]]:
    """Divide pairs into batches of about equal lengths, longest first."""
    by_length = sorted(pairs, key=lambda pair: (-len(pair.prompt), -len(pair.target_ids), -len(pair.source_ids)))
    groups = [by_length]
    if not can_join:  # then prompts have to be equally long
        groups = [list(group) for _, group in groupby(by_length, lambda pair: len(pair.prompt))]
    for group in groups:
        yield from (group[first : first + size] for first in range(0, len(group), size))
