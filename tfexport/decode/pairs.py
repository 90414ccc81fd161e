"""Pairs of a source and a target that is given: checked, and divided into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tfexport.decode.request import check_pairs
from tfexport.errors import nth
from tfexport.runtime.session import Session


@dataclass(frozen=True)
class Pair:
    """A target that is given.

    Attributes:
        number: its place in the call.
        num_pairs: of the call.
        source_ids: of the source, at least one token.
        prompt: start token and prefix: what the decoder reads first.
        target_ids: what stands behind it, at least one token.
    """

    number: int
    num_pairs: int
    source_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    target_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """Which of the call it is, in words."""
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
    """Check everything that is asked, and end each target with `add_eos`; see `check_pairs`."""
    tokens = session.spec.tokens
    pairs = []
    given = check_pairs(session, sources, targets, prefixes, start, add_eos=add_eos, subject=subject)
    for number, (source, target, prefix) in enumerate(given):
        prompt = (tokens.start if start is None else start, *map(int, prefix))
        ended = add_eos and (len(target) == 0 or target[-1] != tokens.eos)
        target_ids = (*map(int, target), *([tokens.eos] if ended else ()))
        pairs.append(Pair(number, len(given), tuple(map(int, source)), prompt, target_ids))
    return pairs


def batches(pairs: Sequence[Pair], size: int, *, can_join: bool) -> Iterator[Sequence[Pair]]:
    """Divide pairs into batches of about equal lengths, longest first."""
    by_length = sorted(pairs, key=lambda pair: (-len(pair.prompt), -len(pair.target_ids), -len(pair.source_ids)))
    groups = [by_length]
    if not can_join:  # then prompts have to be equally long
        groups = [list(group) for _, group in groupby(by_length, lambda pair: len(pair.prompt))]
    for group in groups:
        yield from (group[first : first + size] for first in range(0, len(group), size))
