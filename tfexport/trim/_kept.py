"""Choose the tokens to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.generation import GenerationDefaults
from tfexport.text.config import TextConfig
from tfexport.trim._model import Kept
from tfexport.trim._tokenizer import TokenizerFile


def needed_ids(spec: ModelSpec, text: TextConfig, defaults: GenerationDefaults) -> tuple[set[int], set[int]]:
    """Return the source and target ids in the settings of the model."""
    tokens, samples = spec.tokens, text.samples
    named = {i for name in ("pad", "unk") if (i := getattr(tokens, name)) is not None}
    source = {*named, *text.source_prefix, *text.source_suffix, *(i for one in samples for i in one.source_ids)}
    options = dataclasses.replace(defaults, suppress_tokens=(), begin_suppress_tokens=(), bad_words_ids=())
    target = {tokens.start, tokens.eos, *text.target_prefix, *(i for one in samples for i in one.target_ids)}
    target |= {i for ids in options.tokens.values() for i in ids} | {i for i in named if i < spec.vocab}
    return source, target if text.end is None else target | {text.end}


def ids_of(tokens: Sequence[str], files: Iterable[TokenizerFile]) -> set[int]:
    """Return the ids of tokens as the vocabularies spell them."""
    files = list(files)
    unknown = [token for token in tokens if not any(token in file.ids for file in files)]
    problems = [f"{shortened(token)} is not a token of the model" for token in unknown[:8]]
    raise_all(ConfigError, "keep", problems, remedy="spell tokens as tokenizer.json does")
    return {file.ids[token] for file in files for token in tokens if token in file.ids}


def choose(
    spec: ModelSpec, files: Sequence[TokenizerFile], source: set[int], target: set[int], *, shared: bool
) -> tuple[Kept, list[dict[int, int]]]:
    """Return the new ids of the model, and those of each file.

    A file may have pieces beyond the model. Sides with one table or one file have one numbering.
    """
    sides = [source | files[0].needed(), target | files[-1].needed()]
    if shared:
        sides = [sides[0] | sides[1]] * 2
        for _ in files:  # the parts of one file's tokens may have parts in the other
            for file in files:
                sides = [file.with_parts(sides[0])] * 2
    else:
        sides = [file.with_parts(side) for file, side in zip((files[0], files[-1]), sides, strict=True)]
    # Padding and unknown tokens have one id for both sides, so they come first.
    common = {i for i in (spec.tokens.pad, spec.tokens.unk) if i is not None and i in sides[0] & sides[1]}
    orders = [sorted(side, key=lambda i: (not shared and i not in common, i)) for side in sides]
    new = [{old: place for place, old in enumerate(order)} for order in orders]
    sizes = spec.source_vocab, spec.vocab
    of_source, of_target = (
        {i: place for i, place in side.items() if i < size} for side, size in zip(new, sizes, strict=True)
    )
    return Kept(of_source, of_target), [new[0], new[1]][: len(files)]
