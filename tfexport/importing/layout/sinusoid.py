"""Position tables that some implementations compute and never store, each in its own float32 arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoid(kind: str, length: int, d_model: int) -> Tensor:
    """Compute a table as the original does, rounding included.

    Args:
        kind: "interleaved" has sines at even and cosines at odd columns, its
            wavelengths by a power; "interleaved_exp" the same by an exponential;
            "halves_t2t" all sines, then all cosines, as Tensor2Tensor does;
            "halves_paper" the halves with the wavelengths of "Attention is all
            you need", §3.5; "columns" is "interleaved" with twice the exponent, of
            the column and not of its pair. These two are computed in float64.
        length: rows, from position 0.
        d_model: where it is odd there is one sine more than cosines, of "halves_t2t" a last column of 0.

    Returns:
        float32 [length, d_model].
    """
    wide = torch.float64 if kind in ("halves_paper", "columns") else torch.float32
    position = torch.arange(length, dtype=wide)[:, None]
    column = torch.arange(0, d_model, 2, dtype=wide)
    half = d_model // 2
    if kind == "columns":
        every = torch.arange(d_model, dtype=wide)
        waves = position / 10000 ** (2 * every / d_model)
        return torch.where(every % 2 == 0, waves.sin(), waves.cos()).float()
    match kind:
        case "interleaved_exp":
            angle = position * torch.exp(column * -(math.log(10000.0) / d_model))
        case "halves_t2t":
            step = math.log(10000) / max(half - 1, 1)
            angle = position * torch.exp(torch.arange(half, dtype=wide) * -step)
        case _:
            angle = position / 10000 ** (column / d_model)
    table = torch.zeros(length, d_model, dtype=wide)
    places = (slice(0, None, 2), slice(1, None, 2)) if kind.startswith("interleaved") else _halves(angle.shape[1], half)
    for place, wave in zip(places, (torch.sin(angle), torch.cos(angle[:, :half])), strict=True):
        table[:, place] = wave
    return table.float()


def _halves(sines: int, cosines: int) -> tuple[slice, slice]:
    return slice(0, sines), slice(sines, sines + cosines)
