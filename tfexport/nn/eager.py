"""A model in PyTorch as all that comes behind it knows it, whoever wrote it: the reference of every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

Reference = Callable[..., Tensor]


def at_once(module: Any, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """Call the module as `Transformer` is called, or for an encoder alone its `hidden_states`; see `EagerModel`."""
    if target_ids is None:
        return module.hidden_states(source_ids, source_mask)  # type: ignore[no-any-return]
    return module(source_ids, source_mask, target_ids)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EagerModel:
    """A module that is exported, and what it says of all positions at once.

    Attributes:
        module: float32, in eval mode; it has `encode` and `decode_step` as `tfexport.nn.alignment.EncoderDecoder`
            says, or for an encoder alone `hidden_states`.
        reference: called with the module, source_ids int64 [batch, source_len], source_mask bool likewise (True =
            token) and target_ids int64 [batch, target_len]; returns logits [batch, target_len, vocab]. For an encoder
            alone without target_ids; returns states [batch, source_len, d_model].
    """

    module: nn.Module
    reference: Reference = at_once

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute all positions at once; see `reference`."""
        return self.reference(self.module, *inputs)

    def double(self) -> EagerModel:
        """Return a copy that computes in float64, with the tensors that are kept as plain attributes too."""
        wide = copy.deepcopy(self.module).double()
        for module in wide.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(module, name, value.double())
        return replace(self, module=wide)
