"""The eager reference model that every stage is compared with, and its alignment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tfexport.contract import AlignmentHeads, ModelSpec
from tfexport.nn.cache import (
    Cache,
    Cross,
    KeyValue,
    Source,
    StateCache,
    attention_weights,
    empty_cache,
    split_rows,
)
from tfexport.nn.source import encoder_inputs, position_mask

# Returns logits [batch, target_len, vocab], or without a decoder states [batch, source_len, d_model].
Reference = Callable[..., Tensor]
Generate = Callable[[Any, int], Sequence[int]]


def at_once(module: Any, x: Tensor, source_mask: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """Compute all positions with a module that has the interface of `Transformer`."""
    if target_ids is None:
        return module.hidden_states(x, source_mask)  # type: ignore[no-any-return]
    return module(x, source_mask, target_ids)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EagerModel:
    """A module to export, and a function that computes all its positions at once."""

    module: nn.Module  # an `EncoderDecoder`, or encoder-only with `hidden_states`; float32, in eval mode
    reference: Reference = at_once  # of module, source_ids, source_mask (True = token), and target_ids for a decoder
    generate: Generate | None = None  # the author's own greedy loop, of a source and a limit
    author: str | None = None  # that of `proof_of`

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Call `reference`."""
        return self.reference(self.module, *inputs)

    def double(self) -> EagerModel:
        """Return a float64 copy, including tensors that are plain attributes."""
        wide = copy.deepcopy(self.module)
        to_float64(wide)
        return replace(self, module=wide)


def to_float64(model: nn.Module) -> None:
    """Convert a model and the tensors that are its attributes to float64, in place."""
    model.double()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, name, value.double())


class EncoderDecoder(Protocol):
    """An encoder and a decoder with an explicit cache."""

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        """Return the cross-attention keys and values of each decoder layer."""

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache | StateCache) -> Tensor:
        """Return the logits of the last position, float32 [rows, vocab]."""


class AlignedCross(Cross):
    """Cross-attention that records the mean weights of some heads of one layer."""

    alignment: Tensor  # [batch, target_len, source_len]; set when the layer has attended

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor, selected: AlignmentHeads) -> None:
        super().__init__(key_values, mask)
        self._selected = selected

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source, and record the weights; see `Cross`."""
        if layer == self._selected.layer:
            key = self.key_values[layer].key
            rows, mask = split_rows(query, key.shape[0]), self.mask[:, None, None, :]
            weights = attention_weights(rows, key, mask, scale=scale, softcap=softcap)
            if len(self._selected.heads) < weights.shape[1]:
                weights = weights.index_select(1, torch.tensor(self._selected.heads, device=weights.device))
            self.alignment = weights.mean(1)
        return super().attend(layer, query, scale=scale, softcap=softcap)


def align(
    model: EncoderDecoder, selected: AlignmentHeads, spec: ModelSpec, inputs: Sequence[Tensor], target_ids: Tensor
) -> Tensor:
    """Return the attention of whole targets to the source.

    `selected` is a result of `AlignmentHeads.within`, and `inputs` are those of the encoder graph. The weights are
    float32 [batch, target_len, source_len]; a row sums to 1 and is 0 at padding.
    """
    x, mask = encoder_inputs(spec.source, inputs)
    cross = AlignedCross(model.encode(x, Source(mask)), position_mask(spec.source, mask), selected)
    like, longest = cross.key_values[0].key, spec.max_target_length
    model.decode_step(target_ids, cross, empty_cache(spec.cache, target_ids, like, longest=longest))
    return cross.alignment.float()
