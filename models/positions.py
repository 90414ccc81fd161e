"""Where a token stands: sinusoidal tables and T5's relative bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
