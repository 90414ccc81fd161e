"""Record sample texts with the user's own code around the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.errors import CheckpointError, raise_all, raised_by, shortened
from tfexport.text.config import TextConfig, TextSample


@dataclass(frozen=True, kw_only=True)
class RecordedTexts:
    """Sample texts, and the user's own code around the model.

    Attributes:
        samples: texts as users will send them. A dozen is enough if some of them are unusual.
        to_ids: called as `to_ids(text)`; returns the source ids of one text as in training, including the ids around
            it.
        to_text: called as `to_text(target_ids)` with a list of generated ids, including the end token; returns the text
            to show. None for an encoder-only model.
        start: id that targets begin with.
        end: id that ends a target.
        target_prefix: ids after `start` in every target.
        max_new_tokens: maximum number of generated tokens.
    """

    samples: Sequence[str]
    to_ids: Callable[[str], Sequence[int]]
    to_text: Callable[[list[int]], str] | None = None
    start: int | None = None
    end: int | None = None
    target_prefix: Sequence[int] = ()
    max_new_tokens: int = 32


def record_texts(
    model: nn.Module, forward: Callable[..., Tensor], texts: RecordedTexts, source_vocab: int, target_vocab: int | None
) -> TextConfig:
    """Run every sample through the user's code and the model, with greedy decoding."""
    is_list = texts.samples and not isinstance(texts.samples, str)
    problems = [] if is_list else [f"samples is {shortened(texts.samples)}, expected a list of a dozen texts"]
    needed = ("to_text", "start", "end") if target_vocab is not None else ()
    missing = [name for name in needed if getattr(texts, name) is None]
    problems += [f"{name} is missing; a model with a decoder needs it" for name in missing]
    raise_all(CheckpointError, "reference outputs: texts", problems)
    samples = []
    for number, text in enumerate(texts.samples, 1):
        try:
            samples.append(_record_text(model, forward, texts, text, source_vocab, target_vocab))
        except Exception as error:  # noqa: BLE001 - the user's own code
            problems.append(f"text {number}: {raised_by(error)}")
    raise_all(CheckpointError, "reference outputs: texts", problems)
    return TextConfig(target_prefix=_ids(texts.target_prefix), samples=tuple(samples), end=texts.end)


@torch.no_grad()
def _record_text(
    model: nn.Module,
    forward: Callable[..., Tensor],
    texts: RecordedTexts,
    text: str,
    source_vocab: int,
    target_vocab: int | None,
) -> TextSample:
    source = _ids(texts.to_ids(text))
    if not source or not 0 <= min(source) <= max(source) < source_vocab:
        raise CheckpointError(f"to_ids gives {list(source)[:8]}, expected ids below {source_vocab}")
    if target_vocab is None:
        return TextSample(text=text, source_ids=source)
    assert texts.to_text is not None
    target = _ids(texts.target_prefix)
    source_ids = torch.tensor([source])
    for _ in range(texts.max_new_tokens):
        target_ids = torch.tensor([[texts.start, *target]])
        logits = forward(model, source_ids, torch.ones_like(source_ids, dtype=torch.bool), target_ids)
        target = (*target, int(logits[0, -1].argmax()))
        if target[-1] == texts.end:
            break
    return TextSample(text=text, source_ids=source, target_ids=target, output=texts.to_text(list(target)))


def _ids(ids: Any) -> tuple[int, ...]:
    # A list, or an array or tensor of one row.
    return tuple(int(i) for i in (ids.reshape(-1).tolist() if hasattr(ids, "reshape") else ids))
