"""Compare a canonical model with reference outputs in float64, without padding.

The search compares the short rows only; the final proof also compares the long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.errors import ParityError
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.reference.lengths import LongRow
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.config import Side, StackConfig, TransformerConfig
from tfexport.nn.layers import LayerNorm
from tfexport.nn.transformer import Stack, Transformer, on_meta

# Relative to the largest log-probability. Rounding of float64 causes about 2e-15.
TOLERANCE = 1e-9
# An import may have this multiple of the original's own error, if that computes parts in float32.
BASELINES = 20
_LARGE = 5_000_000  # parameters of a model that runs on several threads


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest differences from reference outputs, relative to the largest value."""

    error: float  # of log-probabilities, or of states or logits for an encoder-only model; infinity for NaN
    encoder_error: float | None  # of recorded encoder states
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
        """Return the first stage that disagrees, as far as it is known."""
        if self.encoder_error is None:
            return "encoder or decoder"
        return "encoder" if self.encoder_error > tolerance else "decoder or head"


def tolerance(reference: ReferenceOutputs, baseline: float = 0.0) -> float:
    """Return the largest error to accept; `baseline` is the documented error."""
    return max(TOLERANCE, BASELINES * max(baseline, reference.baseline))


def compare(canonical: Canonical, reference: ReferenceOutputs) -> Comparison:
    """Run a canonical model on the recorded batch; raise like `check_fits`."""
    check_fits(canonical.config, reference)
    return Comparator(canonical, reference).compare(canonical.config)


def compare_lengths(
    comparator: Comparator, canonical: Canonical, reference: ReferenceOutputs, error: float, wanted: float
) -> tuple[int, int]:
    """Compare the long rows and return the largest source and target length.

    `error` and `wanted` are the error and the tolerance of the short rows. Raises ParityError if a long row differs.
    """
    source, target = source_positions(canonical.config, reference.source_mask.shape[1]), 0
    short = source
    if reference.target_mask is not None:
        target = reference.target_mask.shape[1]
    # Angles and tables that are computed in float32 are wrong in proportion to the position.
    rounding = max(BASELINES * error, wanted if wanted > TOLERANCE else 0.0)
    for row in fitting_rows(canonical.config, reference):
        found, lengths = comparator.compare_row(canonical.config, row), row_lengths(canonical.config, row)
        most = max(wanted, rounding * max(lengths) / short)
        if not found <= most:
            raise ParityError(
                f"reference outputs: the model agrees up to {source} source and {target} target tokens, but not for "
                f"{lengths[0]} and {lengths[1]}: error {found:.1e}, expected at most {most:.0e}; a sliding "
                "window, clamped or rescaled positions? export it as your own module, see "
                "docs/guides/your-own-module.md, or record again with lower max_source_len and max_target_len"
            )
        source, target = max(source, lengths[0]), max(target, lengths[1])
    return source, target


def fitting_rows(config: TransformerConfig, reference: ReferenceOutputs) -> list[LongRow]:
    """Return the long rows within the length limits of a model."""
    limits = (config.max_source_length, config.max_target_length or 0)
    rows = [(row, zip(row_lengths(config, row), limits, strict=True)) for row in reference.long]
    return [row for row, lengths in rows if all(n <= most for n, most in lengths)]


def row_lengths(config: TransformerConfig, row: LongRow) -> tuple[int, int]:
    """Return the numbers of encoder positions and target tokens of a row."""
    return source_positions(config, row.lengths[0]), row.lengths[1]


def source_positions(config: TransformerConfig, length: int) -> int:
    """Return the encoder positions of a number of tokens or frames, or of an image."""
    if config.image:
        return config.image.source.positions
    return int(config.features.source.positions(length)) if config.features else length


def check_fits(config: TransformerConfig, reference: ReferenceOutputs) -> None:
    """Raise a ParityError if the recorded ids or outputs do not fit a model."""
    problems = []
    sources: list[tuple[str, Tensor | None, int, int]] = [
        ("source", reference.source_ids, config.source_vocab, config.max_source_length)
    ]
    if reference.source_ids.dim() == 3:
        sources, dim = [], reference.source_ids.shape[2]
        if config.features is None or config.features.dim != dim:
            expects = f"{config.features.dim} features" if config.features else "token ids"
            problems.append(f"the source has {dim} features, the model reads {expects}")
        elif (positions := source_positions(config, reference.source_ids.shape[1])) > config.max_source_length:
            problems.append(f"{positions} source positions, the model accepts {config.max_source_length}")
    for side, ids, vocab, length in (
        *sources,
        ("target", reference.target_ids, config.target_vocab or 0, config.max_target_length or 0),
    ):
        rows = [row.source_ids if side == "source" else row.target_ids for row in reference.long]
        largest = max((int(each.max()) for each in (ids, *rows) if each is not None), default=-1)
        if largest >= vocab:
            problems.append(f"{side} id {largest} is not below the vocabulary {vocab}")
        if ids is not None and ids.shape[1] > length:
            problems.append(f"{ids.shape[1]} {side} positions, the model accepts {length}")
    if (reference.target_ids is None) != (config.decoder is None):
        has, expects = ("a decoder", "none") if config.decoder else ("no decoder", "one")
        problems = [f"the model has {has}, the reference outputs expect {expects}"]
    for result, name, width in (
        (reference.logits, "logits", config.target_vocab or len(config.labels)),
        (reference.hidden_states, "hidden_states", config.d_model),
    ):
        if result is not None and result.shape[-1] != width:
            problems.append(f"{name} have width {result.shape[-1]}, those of the model have {width}")
    if reference.head not in ("none", config.head):
        problems.append(f"the head of the model is {config.head}, the reference outputs expect {reference.head}")
    if problems:
        raise ParityError(f"reference outputs: {'; '.join(problems)}; were they recorded from this model?")


class Comparator:
    """Compare one float64 model with one batch, under any switches.

    Another comparator can share the model, which takes much longer to build than to run.
    """

    def __init__(self, canonical: Canonical, reference: ReferenceOutputs, model: Transformer | None = None) -> None:
        self.model, self.config, self.reference = model or _build(canonical), canonical.config, reference
        keep = reference.source_mask if reference.target_mask is None else reference.target_mask
        expected = reference.hidden_states if reference.logits is None else reference.logits
        assert expected is not None
        if reference.target_ids is not None:
            expected = expected.log_softmax(-1)
        elif reference.head == "sequence":
            expected, keep = expected[:, None], keep[:, :1]
        self.keep, self.expected = keep, expected
        self.known: dict[TransformerConfig, Comparison] = {}  # of a search
        self.scale = float(expected[keep].abs().max())

    @torch.inference_mode()
    def compare(
        self, config: TransformerConfig, *, mask_source: bool = True, rows: Sequence[LongRow] = ()
    ) -> Comparison:
        """Compare short rows, and `rows`, under the switches of `config`.

        Attention may include padding.
        """
        _set_switches(self.model, config)
        reference, encoder_error = self.reference, None
        mask = reference.source_mask if mask_source else torch.ones_like(reference.source_mask)
        if reference.target_ids is None:
            found = self._encoded(reference.source_ids, mask)
        else:
            found = self.model(reference.source_ids, mask, reference.target_ids).log_softmax(-1)
        if reference.logits is not None and reference.hidden_states is not None:
            states = self.model.hidden_states(reference.source_ids, mask)
            errors = _errors(states, reference.hidden_states, reference.source_mask)
            encoder_error = float(errors.max()) / float(reference.hidden_states[reference.source_mask].abs().max())
        errors = _errors(found, self.expected, self.keep)
        row, position = divmod(int(errors.argmax()), errors.shape[1])
        error = max((float(errors.max()) / self.scale, *(self.compare_row(config, long) for long in rows)))
        return Comparison(error=error, encoder_error=encoder_error, row=row, position=position)

    @torch.inference_mode()
    def compare_row(self, config: TransformerConfig, row: LongRow) -> float:
        """Return the error of a long row under the switches of `config`."""
        _set_switches(self.model, config)
        mask = torch.ones(1, config.max_source_length if config.image else row.lengths[0], dtype=torch.bool)
        if row.target_ids is None:
            found, expected = self._encoded(row.source_ids, mask)[0, row.positions], row.outputs
        else:
            found = self.model(row.source_ids, mask, row.target_ids)[0, row.positions].log_softmax(-1)
            expected = row.outputs.log_softmax(-1)
        errors = _errors(found, expected, torch.ones(len(found), dtype=torch.bool))
        return float(errors.max()) / float(expected.abs().max())

    def _encoded(self, source_ids: Tensor, mask: Tensor) -> Tensor:
        """Return states, or logits of the head, [batch, positions, width]."""
        states = self.model.hidden_states(source_ids, mask)
        if self.reference.logits is None:
            return states
        logits = self.model.classify(states, mask)
        return logits if logits.dim() == 3 else logits[:, None]


def _errors(found: Tensor, expected: Tensor, keep: Tensor) -> Tensor:
    """Return the error per token, [batch, len]: 0 for padding, infinity for NaN."""
    difference = (found - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).amax(-1)
    return difference.where(keep, 0.0)


def _build(canonical: Canonical) -> Transformer:
    with on_meta():
        model = Transformer(canonical.config)
    model.load_state_dict({name: tensor.double() for name, tensor in canonical.tensors.items()}, assign=True)
    return model.eval()


def _set_switches(model: Transformer, config: TransformerConfig) -> None:
    before, model.config = model.config, config
    sides: list[tuple[Side, Stack | None, StackConfig | None]] = [
        ("encoder", model.enc, config.encoder),
        ("decoder", model.dec, config.decoder),
    ]
    for side, stack, sizes in sides:
        if stack is None or sizes is None:
            continue
        stack.embedding_scale = config.value(side, "embedding_scale")
        stack.set_positions(config, side)
        scale = config.d_k(side) ** -0.5 if config.attention_scale is None else config.attention_scale
        for block in stack.blocks:  # `vars`, because modules take long to set an attribute
            own = vars(block)
            own["norm_place"], own["residual_scale"] = sizes.norm_place, sizes.residual_scale
            own["parallel"], vars(block.ffn)["kind"] = sizes.parallel, config.value(side, "activation")
            for attention in (block.self, block.cross) if side == "decoder" else (block.self,):
                own = vars(attention)
                own["num_heads"], own["num_kv_heads"] = sizes.num_heads, config.num_kv_heads(side)
                own["scale"], own["softcap"], own["qk_norm"] = scale, config.attention_softcap, config.qk_norm
        eps = config.value(side, "norm_eps")
        if (before.norm, before.value(side, "norm_eps")) != (config.norm, eps):
            for module in stack.modules():
                if isinstance(module, LayerNorm):
                    module.kind, module.eps = config.norm, eps


@contextmanager
def fitting_threads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run small models on one thread, because threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if sum(tensor.numel() for tensor in tensors) < _LARGE else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
