"""Where a token stands: sinusoidal tables, rotary positions and T5's relative bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.nn.switches import RotaryPairs


def sinusoid_table(length: int, d_model: int) -> Tensor:
    """Build the table of "Attention is all you need", §3.5: sines at even, cosines at odd columns.

    Returns:
        float32 [length, d_model], computed in float64.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    column = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position * torch.exp(column * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle[:, : d_model // 2])
    return table.float()


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distance (T5, arXiv:1910.10683, §2.1).

    Half the buckets hold exact distances, the others grow logarithmically up to
    `max_distance`; the encoder spends half of all on each direction.
    """

    def __init__(self, buckets: int, max_distance: int, num_heads: int, *, bidirectional: bool) -> None:
        """Create the table `weight` [buckets, heads]."""
        super().__init__()
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, num_heads))

    def forward(self, bucket: Tensor) -> Tensor:
        """Return the bias of every query on every key, [rows or 1, heads, target_len, key_len].

        Args:
            bucket: as `bucket` returns it; layers with a table each have the same.
        """
        return F.embedding(bucket, self.weight).permute(0, 3, 1, 2)

    def bucket(self, positions: Tensor, key_len: int) -> Tensor:
        """Return the bucket of the distance from every query to every key.

        Args:
            positions: of the queries, int64 [rows or 1, target_len].
            key_len: number of keys, at positions 0, 1, ….

        Returns:
            int64 [rows or 1, target_len, key_len].
        """
        distance = torch.arange(key_len, device=positions.device) - positions[:, :, None]
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = -distance.clamp(max=0)
        exact = buckets // 2
        # float32, as T5 computes it: a wider type puts some distances into another bucket.
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, far)


@dataclass(frozen=True)
class Rotation:
    """How the tokens of one pass are turned.

    Attributes:
        cos: by token and column of a head, [rows · len, 1, head_dim].
        sin: likewise, negative for the first column of a pair.
        partners: the other column of each pair, int64 [head_dim].
    """

    cos: Tensor
    sin: Tensor
    partners: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Turn queries or keys, [rows · len, heads, head_dim]; the shape stays."""
        return x * self.cos + x.index_select(-1, self.partners) * self.sin


class Rotary:
    """Rotary positions (RoFormer, arXiv:2104.09864): pairs of columns are turned by position · frequency.

    A pair are columns 2i and 2i + 1, or i of each half. Columns behind the first `dim` of a head are left as they are.
    """

    def __init__(self, base: float, dim: int, head_dim: int, pairs: RotaryPairs) -> None:
        """Work out what does not depend on positions; nothing of it is a parameter."""
        with torch.device("cpu"):
            half = torch.arange(dim // 2)
            first, second = (2 * half, 2 * half + 1) if pairs == "interleaved" else (half, half + dim // 2)
            # float32, as everyone computes it: what was trained has learned these numbers and no others.
            frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            frequencies, partners = torch.zeros(head_dim), torch.arange(head_dim)
            frequencies[first], frequencies[second] = -frequency, frequency
            partners[first], partners[second] = second, first
        self._frequencies, self._partners = frequencies.tolist(), partners.tolist()

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Say how tokens at `positions`, int64 [rows, len], are turned; angles are float32 or wider."""
        wide, device = torch.promote_types(dtype, torch.float32), positions.device
        angles = positions.flatten()[:, None, None].to(wide) * torch.tensor(
            self._frequencies, dtype=wide, device=device
        )
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor(self._partners, device=device))


class Alibi:
    """A penalty on the distance, steeper in some heads than in others (arXiv:2108.12409); nothing of it is learned."""

    def __init__(self, num_heads: int) -> None:
        """Work out the slope of each head."""
        self._slopes = _slopes(num_heads)

    def bias(self, positions: Tensor, key_len: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of every query on every key, [rows or 1, heads, target_len, key_len].

        Args:
            positions: of the queries, int64 [rows or 1, target_len].
            key_len: number of keys, at positions 0, 1, ….
            dtype: of the result.
        """
        distance = (torch.arange(key_len, device=positions.device) - positions[:, None, :, None]).abs()
        slopes = torch.tensor(self._slopes, dtype=dtype, device=positions.device)
        return -slopes[:, None, None] * distance.to(dtype)


def _slopes(num_heads: int) -> list[float]:
    """Fall from one power of 2 to the next; heads that make no power of 2 take every other slope of twice as many."""
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + _slopes(2 * power)[0::2][: num_heads - power]
