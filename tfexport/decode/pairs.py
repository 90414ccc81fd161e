"""Pairs of a source and a given target: checked, and divided into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tfexport.decode.request import check_pairs
from tfexport.errors import nth
from tfexport.runtime.session import Session


@dataclass(frozen=True)
class Pair:
    """A source and its given target.

    Attributes:
        number: its place in the call.
        num_pairs: of the call.
        source_ids: at least one token.
        prompt: start token and prefix, which the decoder reads first.
        target_ids: the tokens after them, at least one.
    """

    number: int
    num_pairs: int
    source_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    target_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name in errors."""
        return nth("pair", self.number, self.num_pairs)


def checked_pairs(
    session: Session,
    sources: Iterable[Iterable[int]],
    targets: Iterable[Iterable[int]],
    prefixes: Iterable[Iterable[int]] | None,
    start: int | None,
    *,
    add_eos: bool,
    subject: str,
) -> list[Pair]:
    """Check the arguments of a call as `check_pairs` does; `add_eos` ends each target that does not end yet."""
    tokens = session.spec.tokens
    given = check_pairs(session, sources, targets, prefixes, start, add_eos=add_eos, subject=subject)
    first, pairs = tokens.start if start is None else start, []
    for number, (source, target, prefix) in enumerate(given):
        source_ids, target_ids, prefix_ids = (tuple(map(int, ids)) for ids in (source, target, prefix))
        if add_eos and target_ids[-1:] != (tokens.eos,):
            target_ids = (*target_ids, tokens.eos)
        pairs.append(Pair(number, len(given), source_ids, (first, *prefix_ids), target_ids))
    return pairs


def batches(pairs: Sequence[Pair], size: int, *, can_join: bool) -> Iterator[Sequence[Pair]]:
    """Divide pairs into batches of about equal lengths, longest first; if none can join, with equally long prompts."""
    by_length = sorted(pairs, key=lambda pair: (-len(pair.prompt), -len(pair.target_ids), -len(pair.source_ids)))
    groups = [by_length]
    if not can_join:
        groups = [list(group) for _, group in groupby(by_length, lambda pair: len(pair.prompt))]
    for group in groups:
        yield from (group[first : first + size] for first in range(0, len(group), size))
