"""Remove rows of a model's tables and projection, and renumber every id."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfexport.generation import GenerationDefaults
from tfexport.nn.transformer import Transformer
from tfexport.text.config import TextConfig


@dataclass(frozen=True)
class Kept:
    """The new id of each kept id, in the order of the new ids."""

    source: Mapping[int, int]
    target: Mapping[int, int]


def trimmed_model(model: Transformer, kept: Kept) -> Transformer:
    """Return the model with the rows of kept ids, bit for bit."""
    tokens = model.config.tokens
    config = dataclasses.replace(
        model.config,
        source_vocab=len(kept.source),
        target_vocab=len(kept.target),
        tokens=dataclasses.replace(
            tokens,
            pad=kept.source[tokens.pad],
            start=kept.target[tokens.start],
            eos=kept.target[tokens.eos],
            unk=None if tokens.unk is None else kept.source[tokens.unk],
        ),
    )
    rows = {"enc.embed.weight": kept.source} | dict.fromkeys(
        ("dec.embed.weight", "out.weight", "out.bias"), kept.target
    )
    found = Transformer.unfilled(config)
    old = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            parameter.copy_(old[name][list(rows[name])] if name in rows else old[name])
    return found.eval()


def trimmed_text(text: TextConfig, kept: Kept) -> TextConfig:
    """Renumber the ids around texts and those of recorded texts."""

    def source(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(kept.source[i] for i in ids)

    def target(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(kept.target[i] for i in ids)

    return TextConfig(
        source_prefix=source(text.source_prefix),
        source_suffix=source(text.source_suffix),
        target_prefix=target(text.target_prefix),
        samples=tuple(
            dataclasses.replace(one, source_ids=source(one.source_ids), target_ids=target(one.target_ids))
            for one in text.samples
        ),
        end=None if text.end is None else kept.target[text.end],
    )


def trimmed_defaults(defaults: GenerationDefaults, kept: Kept) -> GenerationDefaults:
    """Renumber the ids of options; drop options about removed tokens."""
    new = kept.target

    def several(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(new[i] for i in ids if i in new)

    def any_of(ids: Any) -> Any:
        return several(ids) if isinstance(ids, tuple) else new.get(ids)

    single = ("forced_bos_token_id", "forced_eos_token_id", "eos_token_id", "decoder_start_token_id")
    return dataclasses.replace(
        defaults,
        suppress_tokens=several(defaults.suppress_tokens),
        begin_suppress_tokens=several(defaults.begin_suppress_tokens),
        bad_words_ids=tuple(several(word) for word in defaults.bad_words_ids if {*word} <= new.keys()),
        sequence_bias=tuple((any_of(ids), bias) for ids, bias in defaults.sequence_bias),
        **{name: any_of(getattr(defaults, name)) for name in single},
    )


def largest_difference(
    full: Transformer, trimmed: Transformer, kept: Kept, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> float:
    """Return the largest difference of the logits of kept ids, in float64.

    It is relative to the largest logit. `pairs` are old ids of sources and targets.
    """
    worst = 0.0
    for model in (full, trimmed):
        model.double()
    with torch.inference_mode():
        for source, target in pairs:
            expected = _logits(full, source, target)[..., list(kept.target)]
            found = _logits(trimmed, [kept.source[i] for i in source], [kept.target[i] for i in target])
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    for model in (full, trimmed):
        model.float()
    return worst


def _logits(model: Transformer, source: Sequence[int], target: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(source)])
    found: Tensor = model(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([list(target)]))
    return found
