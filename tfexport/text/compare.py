"""Compare a tokenizer with recorded texts, and find the cause of differences."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from tfexport.errors import InputError, ParityError
from tfexport.text.config import TextConfig, TextSample
from tfexport.text.tokenizer import Tokenizer

Ids = tuple[int, ...]
_SHOWN = 60


def fit_text_config(load: Callable[[TextConfig], Tokenizer], recorded: TextConfig, given: TextConfig) -> TextConfig:
    """Complete the ids around a text from the recorded texts, and check the tokenizer.

    `load` returns the tokenizer with ids around a text. `given` is the user's configuration without samples; ids that
    it lacks are taken from `recorded`, that of the reference file. Raises ParityError like `check_texts`.
    """
    text = replace(given, target_prefix=given.target_prefix or recorded.target_prefix, samples=recorded.samples)
    text = replace(text, end=recorded.end)
    if not (given.source_prefix or given.source_suffix):
        plain = load(text)
        around = {_around(sample.source_ids, _encoded(plain, sample.text)) for sample in recorded.samples}
        if len(around) == 1 and (found := around.pop()) is not None:
            text = replace(text, source_prefix=found[0], source_suffix=found[1])
    check_texts(load(text))
    return text


def check_texts(tokenizer: Tokenizer) -> None:
    """Raise ParityError for the first text that differs from its record."""
    samples = tokenizer.text.samples
    for number, sample in enumerate(samples, 1):
        found = _encoded(tokenizer, sample.text)
        if found != sample.source_ids:
            raise ParityError(
                f"text {number} of {len(samples)}, {_quoted(sample.text)}: {_difference(sample.source_ids, found)}; "
                f"{_cause(tokenizer, sample, found)}"
            )
        if sample.output is None:
            continue
        decoded = tokenizer.decode(sample.target_ids)
        if decoded != sample.output:
            raise ParityError(
                f"text {number} of {len(samples)}: your code decodes the ids {list(sample.target_ids)[:8]} to "
                f"{_quoted(sample.output)}, the tokenizer to {_quoted(decoded)}; "
                f"{_STRIPPED if decoded.strip() == sample.output else _OTHER_TARGET}"
            )


def _encoded(tokenizer: Tokenizer, text: str) -> Ids | None:
    try:
        return tuple(tokenizer.encode([text])[0])
    except InputError:
        return None


def _around(wanted: Ids, found: Ids | None) -> tuple[Ids, Ids] | None:
    """Return the ids before and after the only `found` in `wanted`, or None."""
    if not found:
        return None
    places = [place for place in range(len(wanted)) if wanted[place : place + len(found)] == found]
    return (wanted[: places[0]], wanted[places[0] + len(found) :]) if len(places) == 1 else None


def _difference(wanted: Ids, found: Ids | None) -> str:
    if found is None:
        return "the tokenizer cannot encode it"
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False)))
    ours, theirs = (str(ids[place]) if place < len(ids) else "the end" for ids in (found, wanted))
    return f"at token {place} the tokenizer has {ours}, your code {theirs}"


def _cause(tokenizer: Tokenizer, sample: TextSample, found: Ids | None) -> str:
    wanted = sample.source_ids
    if found is None:
        return _OTHER
    if around := _around(wanted, found):
        options = ("--source-prefix", "--source-suffix")
        missing = [f"{name} {','.join(map(str, ids))}" for name, ids in zip(options, around, strict=True) if ids]
        return f"your ids {_spelled(around)}, the tokenizer's do not: give {' '.join(missing)}, or add a post-processor"
    if around := _around(found, wanted):
        return (
            f"the tokenizer's ids {_spelled(around)}, yours do not: "
            "remove its post-processor, or --source-prefix and --source-suffix"
        )
    steps = {a - b for a, b in zip(wanted, found, strict=False)}
    if len(wanted) == len(found) and len(steps) == 1:
        (step,) = steps
        side = "above" if step > 0 else "below"
        return f"each of your ids is {abs(step)} {side} the tokenizer's: the vocabularies are shifted"
    for how, change in _CHANGES.items():
        changed = change(sample.text)
        if changed != sample.text and _encoded(tokenizer, changed) == wanted:
            return f"they agree on the text {how}: add such a normalizer to the tokenizer"
    return _OTHER


_OTHER = "give the tokenizer that the model was trained with"
_OTHER_TARGET = "give the target's tokenizer with the decoder of your code, and leave special tokens out of the text"
_STRIPPED = (
    "only the white space around differs: remove strip() from to_text, or end the tokenizer's decoder with "
    "tokenizers.decoders.Strip"
)
_CHANGES: dict[str, Callable[[str], str]] = {
    "in lower case": str.lower,
    "in Unicode's form NFC": functools.partial(unicodedata.normalize, "NFC"),
    "in Unicode's form NFKC": functools.partial(unicodedata.normalize, "NFKC"),
    "without white space around it": str.strip,
}


def _spelled(around: tuple[Ids, Ids]) -> str:
    words = ("begin with", "end with")
    return " and ".join(f"{word} {', '.join(map(str, ids))}" for word, ids in zip(words, around, strict=True) if ids)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
