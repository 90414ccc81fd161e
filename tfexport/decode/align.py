"""Align targets with their sources by cross-attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfexport import _html
from tfexport._arguments import check_call
from tfexport.decode.loop import check_cancelled
from tfexport.decode.request import Pair, batches, check_pairs
from tfexport.errors import BackendError, ConfigError
from tfexport.runtime.session import NO_ALIGNMENT, Aligns, Floats, Session
from tfexport.runtime.sources import Source, pad_right, pad_sources
from tfexport.sources import SourceKind


@dataclass(frozen=True, eq=False)
class Alignment:
    """The alignment of a target with its source by cross-attention.

    Attributes:
        source_ids: including special tokens; empty if the source has features.
        target_ids: without the start token and the prefix.
        weights: float32 [target tokens, source tokens]; each row sums to 1.
        source_positions: for each target token the place of its largest weight, from 0; the first if several are equal.
        source_tokens: source tokens as the tokenizer spells them; empty without a tokenizer.
        target_tokens: target tokens as the tokenizer spells them; empty without a tokenizer.
    """

    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    weights: Floats = field(repr=False)
    source_positions: tuple[int, ...]
    source_tokens: tuple[str, ...] = ()
    target_tokens: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        columns, rows = self.source_tokens or self.source_ids, self.target_tokens or self.target_ids
        return _html.heat_map(columns, rows, self.weights)


def need_alignment(session: Session, subject: str = "align") -> Aligns:
    """Return the session if it can align; raise `ConfigError` if it cannot."""
    if not isinstance(session, Aligns):
        raise ConfigError(f"{subject}: backend {session.backend} cannot return attention; use backend ort or eager")
    if not session.has_alignment:
        raise ConfigError(f"{subject}: {NO_ALIGNMENT}")
    return session


def align(
    session: Session,
    sources: Iterable[Source],
    targets: Iterable[Iterable[int]],
    *,
    prefixes: Iterable[Iterable[int]] | None = None,
    start: int | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> list[Alignment]:
    """Align every target with its source, with the arguments of `Model.align_ids`."""
    check_call("align", batch_size=batch_size, on_progress=on_progress, cancel=cancel)
    pairs = check_pairs(session, sources, targets, prefixes, start, add_eos=False, subject="align")
    reader = need_alignment(session)
    found: dict[int, Alignment] = {}
    for some in batches(pairs, batch_size, can_join=True):
        check_cancelled(cancel)
        for pair, weights in zip(some, _read(reader, some, session.spec.source), strict=True):
            if not np.isfinite(weights).all():
                raise BackendError(
                    f"align: the model returned NaN or infinite weights for {pair.name}; "
                    "check its weights, or export with --precision fp32",
                    indices=[pair.number],
                )
            best = tuple(weights.argmax(1).tolist())
            ids = tuple(pair.source) if session.spec.source_vocab else ()
            found[pair.number] = Alignment(ids, pair.target_ids, weights, best)
        if on_progress:
            on_progress(len(some))
    return [found[pair.number] for pair in pairs]


def _read(session: Aligns, pairs: Sequence[Pair], kind: SourceKind) -> list[Floats]:
    sources = pad_sources(kind, [pair.source for pair in pairs])
    # The last token is not read, because nothing follows it. Any token can pad, because no position attends to it.
    read = [(*pair.prompt, *pair.target_ids[:-1]) for pair in pairs]
    target_ids, _ = pad_right(read, pairs[0].prompt[0])
    weights = session.align(sources, target_ids)
    return [
        rows[len(pair.prompt) - 1 : len(ids), : pair.source_length].copy()
        for pair, ids, rows in zip(pairs, read, weights, strict=True)
    ]


def unknown_sources(
    session: Session,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    may_copy: Sequence[Sequence[bool]],
    unknown: int,
    *,
    start: int | None = None,
    batch_size: int = 32,
    cancel: threading.Event | None = None,
) -> list[dict[int, int]]:
    """Map the place of each unknown target token to that of its source token.

    `pairs` are sources and their generated targets; `may_copy` states which source tokens may be copied.
    """
    found: list[dict[int, int]] = [{} for _ in pairs]
    some = [number for number, (_, target) in enumerate(pairs) if unknown in target and any(may_copy[number])]
    sources, targets = ([pairs[number][side] for number in some] for side in (0, 1))
    aligned = align(session, sources, targets, start=start, batch_size=batch_size, cancel=cancel)
    for number, alignment in zip(some, aligned, strict=True):
        best = np.where(may_copy[number], alignment.weights, -1).argmax(1)
        places = [place for place, token in enumerate(alignment.target_ids) if token == unknown]
        found[number] = {place: int(best[place]) for place in places}
    return found
