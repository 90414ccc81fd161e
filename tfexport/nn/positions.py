"""Positions: sinusoidal tables, rotary positions, T5's relative bias and ALiBi."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.nn.switches import RotaryPairs, RotaryScaling


def sinusoid_table(length: int, d_model: int) -> Tensor:
    """Build the position table of "Attention is all you need", §3.5."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    column = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position * torch.exp(column * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle[:, : d_model // 2])
    return table.float()


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distance (T5, arXiv:1910.10683, §2.1).

    Half of the buckets are exact distances, the others grow logarithmically up to `max_distance`.
    """

    def __init__(self, buckets: int, max_distance: int, num_heads: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, num_heads))

    def forward(self, bucket: Tensor) -> Tensor:
        """Return the bias [rows or 1, heads, target_len, key_len] of a result of `bucket`."""
        return F.embedding(bucket, self.weight).permute(0, 3, 1, 2)

    def bucket(self, positions: Tensor, key_len: int) -> Tensor:
        """Return the bucket of the distance from `positions` to every key at 0, 1, …."""
        distance = torch.arange(key_len, device=positions.device) - positions[:, :, None]
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2  # half of them for each direction
            offset = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = -distance.clamp(max=0)
        exact = buckets // 2
        # float32, as in T5: a wider type puts some distances into another bucket.
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, far)


@dataclass(frozen=True)
class Rotation:
    """Rotation of the tokens of one pass."""

    cos: Tensor  # [rows · len, 1, head_dim]
    sin: Tensor  # negative for the first column of a pair
    partners: Tensor  # the other column of each pair, int64 [head_dim]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [rows · len, heads, head_dim]."""
        return x * self.cos + x.index_select(-1, self.partners) * self.sin


Scaling = tuple[RotaryScaling, float, int]  # kind, factor, original length
UNSCALED: Scaling = "none", 1.0, 1


class Rotary:
    """Rotary positions (RoFormer, arXiv:2104.09864), without parameters.

    Pairs among the first `dim` columns of a head are rotated by position · frequency. Scaling is that of transformers,
    with low_freq_factor 1 and high_freq_factor 4.
    """

    def __init__(self, base: float, dim: int, head_dim: int, pairs: RotaryPairs, scaling: Scaling = UNSCALED) -> None:
        kind, factor, original_length = scaling
        with torch.device("cpu"):
            half = torch.arange(dim // 2)
            first, second = (2 * half, 2 * half + 1) if pairs == "interleaved" else (half, half + dim // 2)
            # float32, as in other implementations: models were trained with these rounded frequencies.
            frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            if kind != "none":
                turns = original_length / (2 * math.pi / frequency)
                share = ((turns - 1) / 3).clamp(0, 1) if kind == "llama3" else 0.0  # of frequencies that are kept
                frequency = (1 - share) * frequency / factor + share * frequency
            frequencies, partners = torch.zeros(head_dim), torch.arange(head_dim)
            frequencies[first], frequencies[second] = -frequency, frequency
            partners[first], partners[second] = second, first
        self._frequencies, self._partners = frequencies.tolist(), partners.tolist()

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of tokens at `positions`, int64 [rows, len]."""
        wide, device = torch.promote_types(dtype, torch.float32), positions.device
        frequencies = torch.tensor(self._frequencies, dtype=wide, device=device)
        angles = positions.flatten()[:, None, None].to(wide) * frequencies
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor(self._partners, device=device))


class Alibi:
    """A penalty on the distance with a fixed slope per head (arXiv:2108.12409)."""

    def __init__(self, num_heads: int) -> None:
        self._slopes = _slopes(num_heads)

    def bias(self, positions: Tensor, key_len: int, dtype: torch.dtype) -> Tensor:
        """Return the bias [rows or 1, heads, target_len, key_len] of the scores."""
        distance = (torch.arange(key_len, device=positions.device) - positions[:, None, :, None]).abs()
        slopes = torch.tensor(self._slopes, dtype=dtype, device=positions.device)
        return -slopes[:, None, None] * distance.to(dtype)


def _slopes(num_heads: int) -> list[float]:
    # If the number of heads is not a power of 2, the others take every second slope of twice that power.
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + _slopes(2 * power)[0::2][: num_heads - power]
