"""Unknown tokens of a target: which source token each was read from, so that its text can stand there instead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfexport.decode.align import align
from tfexport.runtime.session import Session


@dataclass(frozen=True)
class Answer:
    """A target that a model gave.

    Attributes:
        source_ids: of its source.
        target_ids: without the start token.
        is_text: for each source token whether it may be copied; those around a text may not.
    """

    source_ids: Sequence[int]
    target_ids: Sequence[int]
    is_text: Sequence[bool]


def unknown_sources(
    session: Session,
    answers: Sequence[Answer],
    unknown: int,
    *,
    start: int | None = None,
    batch_size: int = 32,
    cancel: threading.Event | None = None,
) -> list[dict[int, int]]:
    """Find for every unknown token of a target the source token with the largest weight.

    Args:
        session: of a backend that aligns.
        answers: only those with an unknown token are read again.
        unknown: id of that token.
        start: id that the decoder read first; None for the model's own.
        batch_size: answers read at once.
        cancel: looked at before each batch; None for a call that nobody cancels.

    Returns:
        For each answer, by the place of each unknown token, the place of its source token.

    Raises:
        ConfigError: the bundle or the backend has no alignment.
        BackendError: the backend failed.
        Cancelled: the event is set.
    """
    found: list[dict[int, int]] = [{} for _ in answers]
    some = [number for number, one in enumerate(answers) if unknown in one.target_ids and any(one.is_text)]
    sources, targets = ([getattr(answers[number], side) for number in some] for side in ("source_ids", "target_ids"))
    aligned = align(session, sources, targets, start=start, batch_size=batch_size, cancel=cancel)
    for number, alignment in zip(some, aligned, strict=True):
        best = np.where(answers[number].is_text, alignment.weights, -1).argmax(1)
        found[number] = {
            place: int(best[place]) for place, token in enumerate(alignment.target_ids) if token == unknown
        }
    return found
