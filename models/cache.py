"""The keys and values that decoding keeps between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyValue:
    """Keys and values of one attention.

    Attributes:
        key: [rows, heads, len, head_dim].
        value: [rows, heads, len, value_dim].
    """

    key: Tensor
    value: Tensor


class Cache(Protocol):
    """What a decoder needs of its self-attention cache.

    The model asks for positions and mask once a step and hands over each
    layer's new keys and values; how they are kept is the cache's affair.
    """

    def positions(self, target_ids: Tensor) -> Tensor:
        """Return the position of every new token, int64 [rows or 1, target_len]."""
        ...

    def mask(self, target_ids: Tensor) -> Tensor:
        """Return what may be attended to, bool [rows or 1, 1, target_len, len]."""
        ...

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Keep a layer's new keys and values, return all it may attend to."""
        ...


class ConcatCache:
    """A cache that grows: the past and the new tokens, concatenated.

    Attributes:
        past: one `KeyValue` a layer of length past_len, which may be 0.
        present: filled by `update`, length past_len + target_len.
    """

    def __init__(self, past: Sequence[KeyValue]) -> None:
        """Start from the past of every layer; the tensors are only read."""
        self.past = list(past)
        self.present: list[KeyValue] = []

    def positions(self, target_ids: Tensor) -> Tensor:
        """Return past_len, past_len + 1, …, int64 [1, target_len]."""
        past_len = self.past[0].key.shape[2]
        return torch.arange(past_len, past_len + target_ids.shape[1], device=target_ids.device)[None]

    def mask(self, target_ids: Tensor) -> Tensor:
        """Return the causal mask, bool [1, 1, target_len, past_len + target_len]."""
        positions = self.positions(target_ids)
        keys = torch.arange(self.past[0].key.shape[2] + target_ids.shape[1], device=target_ids.device)
        return keys <= positions[:, None, :, None]

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Append the new tokens of `layer`; layers come in order."""
        past = self.past[layer]
        present = KeyValue(torch.cat((past.key, new.key), 2), torch.cat((past.value, new.value), 2))
        self.present.append(present)
        return present
