"""Record rows up to the length limits of the original model.

A short batch cannot show a sliding window, clamped positions, or rotary positions that are rescaled for long texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, raise_all
from tfexport.sources import FeatureSource, ImageSource

LENGTHS = (16, 32, 64, 128, 256, 512, 1024)  # and the limits of the model
LONG = "long."  # prefix of the tensors in a reference file
_KEPT = 4  # positions of each row whose outputs are kept
# Words in errors about rows that are too long.
_TOO_LONG = re.compile("length|long|size|shape|index|range|bound|dimension|position|exceed|match", re.IGNORECASE)
Run = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class LongRow:
    """One row without padding, and the outputs at some of its positions."""

    source_ids: Tensor  # int64 [1, source_len], or float32: features [1, frames, dim] or pixels [1, channels, …]
    target_ids: Tensor | None = None  # int64 [1, target_len]; None for an encoder-only model
    positions: Tensor  # int64 [n], of target tokens, or of source tokens for an encoder-only model
    outputs: Tensor  # logits or log-probabilities, float64 [n, vocab], or states [n, d_model]

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of source tokens or frames, and of target tokens."""
        return self.source_ids.shape[1], 0 if self.target_ids is None else self.target_ids.shape[1]

    def problems(self, *, has_targets: bool, width: int) -> Iterator[str]:
        """Describe what is wrong with the row."""
        for ids in (None if self.source_ids.dim() > 2 else self.source_ids, self.target_ids):
            is_row = ids is None or (ids.dtype == torch.int64 and ids.dim() == 2 and len(ids) == 1 and ids.numel() > 0)
            if not is_row or (ids is not None and int(ids.min()) < 0):
                yield f"ids are {_described(ids)}, expected int64 [1, length] of 0 or more"
                return
        if has_targets != (self.target_ids is not None):
            yield "its target_ids and those of the short rows need each other"
            return
        length, kept = self.lengths[has_targets], self.positions
        if kept.dtype != torch.int64 or kept.dim() != 1 or not kept.numel():
            yield f"positions are {_described(kept)}, expected int64 [n]"
        elif not 0 <= int(kept.min()) <= int(kept.max()) < length:
            yield f"positions reach {int(kept.max())}, expected 0 to {length - 1}"
        elif self.outputs.dtype != torch.float64 or list(self.outputs.shape) != [kept.numel(), width]:
            yield f"outputs are {_described(self.outputs)}, expected torch.float64 [{kept.numel()}, {width}]"
        elif not bool(self.outputs.isfinite().all()):
            yield "outputs hold NaN or infinity"


class IdRange(NamedTuple):
    """The ids of one side, and the lengths to try."""

    vocab: int
    pad: int
    short: int  # a length that the model accepts
    longest: int

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw ids without padding, int64 of `shape`."""
        ids = torch.randint(0, self.vocab - 1, shape, generator=generator)
        return ids + (ids >= self.pad)


class FrameRange(NamedTuple):
    """Features of the source, and the numbers of encoder positions to try."""

    source: FeatureSource
    short: int
    longest: int

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw features of [rows, positions], float32 [rows, frames, dim]."""
        frames = self.source.frames or self.source.most_frames(shape[1])
        return torch.randn((shape[0], frames, self.source.dim), generator=generator)


class PixelRange(NamedTuple):
    """Images of the source, which have one number of encoder positions."""

    source: ImageSource
    short: int
    longest: int

    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw pixels of [rows, positions], float32 [rows, channels, height, width]."""
        source = self.source
        return torch.randn((shape[0], source.channels, source.height, source.width), generator=generator)


def record_rows(
    run: Run, sides: Sequence[IdRange | FrameRange], generator: torch.Generator, first_target: int | None = None
) -> tuple[tuple[LongRow, ...], str | None]:
    """Run rows of growing length, up to the longest that the model accepts.

    `run` gets ids of each of `sides`, int64 [1, length], and returns outputs [1, length of the last side, width]. The
    first target id is `first_target` if the decoder starts without a token. Also returns the last error that does not
    look like a length limit.
    """
    errors: list[str] = []

    def row(lengths: Sequence[int]) -> LongRow | None:
        ids = [side.draw((1, length), generator) for side, length in zip(sides, lengths, strict=True)]
        if first_target is not None and len(ids) > 1:
            ids[1][:, 0] = first_target
        return run_row(run, ids, errors)

    short = [side.short for side in sides]
    singles = []
    for number, side in enumerate(sides):

        def accepts(length: int, number: int = number) -> bool:
            return row([*short[:number], length, *short[number + 1 :]]) is not None

        singles.append(_longest(accepts, side.short, side.longest))
    if singles == short and len({*short}) == 1:  # the lengths of both sides have to be equal
        most = min(side.longest for side in sides)
        singles = [_longest(lambda length: row([length] * len(sides)) is not None, short[0], most)] * len(sides)
    several = [length for length in LENGTHS if length < max(singles)] + [max(singles)]
    wanted = dict.fromkeys(tuple(min(length, most) for most in singles) for length in several)
    rows = [row(lengths) for lengths in wanted if any(n > m for n, m in zip(lengths, short, strict=True))]
    if rows and rows[-1] is None:  # both sides together are too long
        rows += [row([*short[:i], most, *short[i + 1 :]]) for i, most in enumerate(singles) if most > short[i]]
    return tuple(one for one in rows if one is not None), errors[-1] if errors else None


def write_rows(rows: Sequence[LongRow]) -> dict[str, Tensor]:
    """Return the tensors of rows for a reference file, by name."""
    return {
        f"{LONG}{number}.{part.name}": value
        for number, one in enumerate(rows)
        for part in fields(LongRow)
        if (value := getattr(one, part.name)) is not None
    }


def read_rows(tensors: Mapping[str, Tensor]) -> tuple[LongRow, ...]:
    """Return the rows that `write_rows` has named."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, part = name.removeprefix(LONG).partition(".")
        parts.setdefault(number, {})[part] = tensor
    known = {part.name for part in fields(LongRow)}
    needed = known - {"target_ids"}
    problems = [
        f"long row {number[:20]} has {', '.join(sorted(found))[:120]}, expected {', '.join(sorted(known))}"
        for number, found in parts.items()
        if not number.isdecimal() or not needed <= found.keys() <= known
    ]
    raise_all(CheckpointError, "tensors", problems, remedy="record it again")
    return tuple(LongRow(**parts[number]) for number in sorted(parts, key=int))


def run_row(run: Run, ids: Sequence[Tensor], others: list[str] | None = None) -> LongRow | None:
    """Return a row, or None with an error, in `others` if unlike a length limit."""
    try:
        outputs = run(*ids)
    except Exception as error:  # noqa: BLE001 - models refuse long rows with any error
        if others is not None and not (isinstance(error, IndexError) or _TOO_LONG.search(str(error))):
            lengths = " and ".join(str(one.shape[1]) for one in ids)
            others.append(f"{lengths} tokens ended with {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return None
    length = ids[-1].shape[1]
    if isinstance(outputs, Tensor) and outputs.dim() == 2:  # of a pooled head
        outputs, length = outputs[:, None], 1
    if not isinstance(outputs, Tensor) or outputs.dim() != 3 or outputs.shape[:2] != (1, length):
        return None
    positions = torch.tensor(sorted({(length - 1) * part // _KEPT for part in range(1, _KEPT + 1)}))
    found = outputs[0, positions].detach().double().cpu().clone()
    if not bool(found.isfinite().all()):
        return None
    target_ids = ids[1] if len(ids) > 1 else None
    return LongRow(source_ids=ids[0], target_ids=target_ids, positions=positions, outputs=found)


def _longest(accepts: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest accepted length; `least` is accepted."""
    if most <= least:
        return least
    if accepts(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if accepts(middle) else (least, middle)
    return least


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
