"""Compare a canonical model with reference outputs in float64, without padding."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.errors import ParityError
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.config import Side, TransformerConfig
from tfexport.nn.layers import LayerNorm
from tfexport.nn.meta import on_meta
from tfexport.nn.transformer import Block, Stack, Transformer

# Relative to the largest log-probability. Rounding of float64 causes about 2e-15.
TOLERANCE = 1e-9
# An import may have this multiple of the original's own error, if that computes parts in float32.
BASELINES = 20
# Models with fewer parameters than this run on one thread.
_LARGE = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Difference between a canonical model and reference outputs.

    `error` is the largest difference of log-probabilities, or of states for an encoder-only model, at `row` and
    `position`. It is relative to the largest absolute value. `encoder_error` is that of recorded encoder states. NaN
    counts as infinity.
    """

    error: float
    encoder_error: float | None
    row: int
    position: int

    @property
    def worst(self) -> float:
        """Largest error of any stage."""
        return max(self.error, self.encoder_error or 0.0)

    def passed(self, tolerance: float) -> bool:
        """Return whether every error is within `tolerance`."""
        return self.worst <= tolerance

    def stage(self, tolerance: float) -> str:
        """Return the first stage that disagrees, "encoder or decoder" if it is unknown."""
        if self.encoder_error is None:
            return "encoder or decoder"
        return "encoder" if self.encoder_error > tolerance else "decoder"


def tolerance(reference: ReferenceOutputs, baseline: float = 0.0) -> float:
    """Return the largest error to accept; `baseline` is the documented error."""
    return max(TOLERANCE, BASELINES * max(baseline, reference.baseline))


def compare(canonical: Canonical, reference: ReferenceOutputs) -> Comparison:
    """Run a canonical model on the recorded batch; raise like `check_fits`."""
    check_fits(canonical.config, reference)
    return Comparator(canonical, reference).compare(canonical.config)


def check_fits(config: TransformerConfig, reference: ReferenceOutputs) -> None:
    """Check that a model accepts the recorded ids and has outputs of that shape.

    Raises:
        ParityError: Lists every id, length, output width and decoder that does not fit.
    """
    problems = _id_problems("source", reference.source_ids, config.source_vocab, config.max_source_length)
    if reference.target_ids is not None:
        sizes = config.target_vocab or 0, config.max_target_length or 0
        problems += _id_problems("target", reference.target_ids, *sizes)
    if (reference.target_ids is None) != (config.decoder is None):
        has, expects = ("a decoder", "none") if config.decoder else ("no decoder", "one")
        problems = [f"the model has {has}, the reference outputs expect {expects}"]
    for result, name, width in (
        (reference.logits, "logits", config.target_vocab),
        (reference.hidden_states, "hidden_states", config.d_model),
    ):
        if result is not None and result.shape[2] != width:
            problems.append(f"{name} have width {result.shape[2]}, the model gives {width}")
    if problems:
        raise ParityError(f"reference outputs: {'; '.join(problems)}; were they recorded from this model?")


def _id_problems(side: str, ids: Tensor, vocab: int, length: int) -> list[str]:
    problems = []
    if int(ids.max()) >= vocab:
        problems.append(f"{side} id {int(ids.max())} is not below the vocabulary {vocab}")
    if ids.shape[1] > length:
        problems.append(f"{ids.shape[1]} {side} positions, the model takes {length}")
    return problems


class Comparator:
    """Compare one set of tensors with one batch, under any switches.

    Building a model takes much longer than running a small one, so the float64 model is built once and its switches are
    set. If `mask_source` is False, attention includes padding.
    """

    def __init__(self, canonical: Canonical, reference: ReferenceOutputs, *, mask_source: bool = True) -> None:
        self.mask_source = mask_source
        self.model = build(canonical.config, canonical.tensors)
        self._take(reference)

    def on(self, reference: ReferenceOutputs) -> Comparator:
        """Return a comparator on another batch that shares the tensors."""
        other = copy.copy(self)
        other._take(reference)
        return other

    def _take(self, reference: ReferenceOutputs) -> None:
        self.reference = reference
        keep = reference.source_mask if reference.target_mask is None else reference.target_mask
        expected = reference.hidden_states if reference.logits is None else reference.logits.log_softmax(-1)
        assert expected is not None
        self.keep, self.expected = keep, expected
        self.scale = float(expected[keep].abs().max())

    @torch.inference_mode()
    def compare(self, config: TransformerConfig) -> Comparison:
        """Compare under the switches of `config`, whose sizes are those of the tensors."""
        set_switches(self.model, config)
        reference = self.reference
        mask = reference.source_mask if self.mask_source else torch.ones_like(reference.source_mask)
        encoder_error = None
        if reference.target_ids is None:
            found = self.model.hidden_states(reference.source_ids, mask)
        else:
            found = self.model(reference.source_ids, mask, reference.target_ids).log_softmax(-1)
            if reference.hidden_states is not None:
                states = self.model.hidden_states(reference.source_ids, mask)
                errors = _errors(states, reference.hidden_states, reference.source_mask)
                encoder_error = float(errors.max()) / float(reference.hidden_states[reference.source_mask].abs().max())
        errors = _errors(found, self.expected, self.keep)
        row, position = divmod(int(errors.argmax()), errors.shape[1])
        return Comparison(
            error=float(errors.max()) / self.scale, encoder_error=encoder_error, row=row, position=position
        )


def _errors(found: Tensor, expected: Tensor, keep: Tensor) -> Tensor:
    """Return the error per token, [batch, len]: 0 for padding, infinity for NaN."""
    difference = (found - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).amax(-1)
    return difference.where(keep, 0.0)


def build(config: TransformerConfig, tensors: Mapping[str, Tensor]) -> Transformer:
    """Build a float64 model in eval mode from canonical tensors."""
    with on_meta():
        model = Transformer(config)
    model.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, assign=True)
    return model.eval()


def set_switches(model: Transformer, config: TransformerConfig) -> None:
    """Set the switches and heads of a built model, in place."""
    model.config = config
    sides: list[tuple[Side, Stack | None]] = [("encoder", model.enc), ("decoder", model.dec)]
    for side, stack in sides:
        if stack is not None:
            stack.embedding_scale = config.embedding_scale
            stack.set_positions(config, side)
            for block in stack.blocks:
                _set_block_switches(block, config, side)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.kind, module.eps = config.norm, config.norm_eps


def _set_block_switches(block: Block, config: TransformerConfig, side: Side) -> None:
    sizes = config.encoder if side == "encoder" else config.decoder
    assert sizes is not None
    block.norm_place = sizes.norm_place
    block.residual_scale = sizes.residual_scale
    block.ffn.kind = config.activation
    for attention in (block.self, block.cross) if side == "decoder" else (block.self,):
        attention.num_heads, attention.num_kv_heads = sizes.num_heads, config.num_kv_heads(side)
        attention.softcap, attention.qk_norm = config.attention_softcap, config.qk_norm
        attention.scale = config.d_k(side) ** -0.5 if config.attention_scale is None else config.attention_scale


@contextmanager
def fitting_threads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run small models on one thread; large models keep the threads of PyTorch.

    On a busy machine, threads that share a small operation mostly wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if sum(tensor.numel() for tensor in tensors) < _LARGE else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
