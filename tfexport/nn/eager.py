"""The eager reference model that every stage is compared with, and its alignment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tfexport.contract import AlignmentHeads
from tfexport.nn.cache import Cache, ConcatCache, Cross, KeyValue, Source, attention_weights, split_rows

Reference = Callable[..., Tensor]


def at_once(module: Any, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """Compute all positions with a module that has the interface of `Transformer`."""
    if target_ids is None:
        return module.hidden_states(source_ids, source_mask)  # type: ignore[no-any-return]
    return module(source_ids, source_mask, target_ids)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EagerModel:
    """A module to export, and a function that computes all its positions at once.

    Attributes:
        module: float32, in eval mode; an `EncoderDecoder`, or an encoder-only module with `hidden_states`.
        reference: called with the module, source_ids int64 [batch, source_len], source_mask bool [batch, source_len]
            (True = token) and target_ids int64 [batch, target_len]; returns logits [batch, target_len, vocab]. For an
            encoder-only module it is called without target_ids and returns states [batch, source_len, d_model].
    """

    module: nn.Module
    reference: Reference = at_once

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute all positions at once with `reference`."""
        return self.reference(self.module, *inputs)

    def double(self) -> EagerModel:
        """Return a float64 copy, including tensors that are plain attributes."""
        wide = copy.deepcopy(self.module).double()
        for module in wide.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(module, name, value.double())
        return replace(self, module=wide)


class EncoderDecoder(Protocol):
    """An encoder and a decoder with an explicit cache."""

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        """Return the cross-attention keys and values of each decoder layer."""
        ...

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        """Return the logits of the last position, float32 [rows, vocab].

        Every layer attends through `cross` and `cache`.
        """
        ...


class AlignedCross(Cross):
    """Cross-attention that records the mean weights of some heads of one layer.

    Attributes:
        alignment: float32 or wider [batch, target_len, source_len]; set when the layer has attended.
    """

    alignment: Tensor

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor, named: AlignmentHeads) -> None:
        """Create it from an encoder's result and the mask of its source."""
        super().__init__(key_values, mask)
        self._named = named

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source, and record the weights; see `Cross`."""
        if layer == self._named.layer:
            key = self.key_values[layer].key
            rows, mask = split_rows(query, key.shape[0]), self.mask[:, None, None, :]
            weights = attention_weights(rows, key, mask, scale=scale, softcap=softcap)
            heads = self._named.heads
            if len(heads) < weights.shape[1]:
                weights = weights.index_select(1, torch.tensor(heads, device=weights.device))
            self.alignment = weights.mean(1)
        return super().attend(layer, query, scale=scale, softcap=softcap)


def align(
    model: EncoderDecoder, named: AlignmentHeads, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
) -> Tensor:
    """Return the attention of the tokens of whole targets to the source.

    Args:
        model: in eval mode.
        named: layer and heads, as `AlignmentHeads.within` returns them.
        source_ids: int64 [batch, source_len].
        source_mask: bool [batch, source_len], True = token.
        target_ids: decoder inputs, the start token first, int64 [batch, target_len].

    Returns:
        float32 [batch, target_len, source_len]; a row sums to 1 and is 0 at padding.
    """
    cross = AlignedCross(model.encode(source_ids, Source(source_mask)), source_mask, named)
    # Self-attention has the same heads and widths as cross-attention, so an empty slice of it is an empty past.
    past = [KeyValue(kept.key[:, :, :0], kept.value[:, :, :0]) for kept in cross.key_values]
    model.decode_step(target_ids, cross, ConcatCache(past, target_ids))
    return cross.alignment.float()
