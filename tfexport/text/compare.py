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
_SHOWN, _SHOWN_IDS = 60, 8


def fit(load: Callable[[TextConfig], Tokenizer], recorded: TextConfig, given: TextConfig) -> Tokenizer:
    """Load a tokenizer with the ids around a text that the recorded texts show.

    `given` is the user's configuration without samples; ids that it lacks are taken from `recorded`, that of the
    reference file. Samples of only unknown tokens, which the tokenizer refuses, are left out.
    """
    text = replace(given, target_prefix=given.target_prefix or recorded.target_prefix, end=recorded.end)
    if not (given.source_prefix or given.source_suffix):
        plain = load(text)
        around = {_around(sample.source_ids, encoded(plain, sample.text)) for sample in recorded.samples} - {None}
        if len(around) == 1 and (found := around.pop()):
            text = replace(text, source_prefix=found[0], source_suffix=found[1])
    tokenizer, first, last = load(text), len(text.source_prefix), -len(text.source_suffix) or None
    is_known = [set(one.source_ids[first:last]) != {tokenizer.source_unknown} for one in recorded.samples]
    pairs = zip(is_known, recorded.samples, strict=True)
    samples = tuple(one for known, one in pairs if known or encoded(tokenizer, one.text))
    return load(replace(text, samples=samples or recorded.samples))


def unlike(tokenizer: Tokenizer) -> tuple[int, int, int, int]:
    """Count differing texts, differences in length, differing ids and outputs."""
    texts, gaps, ids, outputs = 0, set[int](), 0, 0
    for sample in tokenizer.text.samples:
        wanted, found = sample.source_ids, encoded(tokenizer, sample.text)
        texts += found != wanted
        gaps.add(len(wanted) - len(found))
        ids += sum(a != b for a, b in zip(found, wanted, strict=False))
        outputs += sample.output is not None and tokenizer.decode(sample.target_ids) != sample.output
    return texts, len(gaps), ids, outputs


def check_texts(tokenizer: Tokenizer) -> None:
    """Raise ParityError for the first text that differs, with the step that differs."""
    samples = tokenizer.text.samples
    for number, sample in enumerate(samples, 1):
        subject = f"text {number} of {len(samples)}, {_quoted(sample.text)}"
        if (found := encoded(tokenizer, sample.text)) != sample.source_ids:
            step, remedy = _cause(tokenizer, sample, found)
            raise ParityError(f"{step}: {_difference(sample.source_ids, found)}", subject=subject, remedy=remedy)
        wanted = sample.output
        if wanted is not None and (decoded := tokenizer.decode(sample.target_ids)) != wanted:
            remedy = next((how for how, change in _OUTPUTS.items() if change(decoded) == change(wanted)), _OTHER_TARGET)
            problem = f"decoding: your code makes {_quoted(wanted)} of the ids {list(sample.target_ids)[:_SHOWN_IDS]}"
            raise ParityError(f"{problem}, the tokenizer {_quoted(decoded)}", subject=subject, remedy=remedy)


def encoded(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a source, none if it is refused."""
    try:
        return tuple(tokenizer.encode([text])[0])
    except InputError:
        return ()


def _around(wanted: Ids, found: Ids) -> tuple[Ids, Ids] | None:
    """Return the ids before and after the only `found` in `wanted`, or None."""
    places = [place for place in range(len(wanted)) if wanted[place : place + len(found)] == found != ()]
    return (wanted[: places[0]], wanted[places[0] + len(found) :]) if len(places) == 1 else None


def _difference(wanted: Ids, found: Ids) -> str:
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False)))
    ours, theirs = (list(ids)[max(0, place - 2) :][:_SHOWN_IDS] for ids in (found, wanted))
    return f"the tokenizer has {f'the ids {ours}' if found else 'no ids'} at token {place}, your code {theirs}"


def _cause(tokenizer: Tokenizer, sample: TextSample, found: Ids) -> tuple[str, str]:
    """Return the step that differs and a remedy."""
    wanted = sample.source_ids
    if around := _around(wanted, found):
        options = ("--source-prefix", "--source-suffix")
        missing = [f"{name} {','.join(map(str, ids))}" for name, ids in zip(options, around, strict=True) if ids]
        remedy = f"your ids {_spelled(around)}, the tokenizer's do not: give {' '.join(missing)}"
        return "ids around the text", remedy
    if around := _around(found, wanted):
        remedy = "remove its post-processor, or --source-prefix and --source-suffix"
        return "ids around the text", f"the tokenizer's ids {_spelled(around)}, yours do not: {remedy}"
    for how, change in _CHANGES.items():
        if (changed := change(sample.text)) != sample.text and encoded(tokenizer, changed) == wanted:
            return "normalization", f"they agree on the text {how}: add such a normalizer to tokenizer.json"
    for first in range(len(wanted) - len(found) + 1):
        pairs = zip(wanted[first:], found, strict=False)
        steps = {a - b for a, b in pairs if tokenizer.source_unknown not in (a, b)}
        if steps == {0} and len(found) == len(wanted):
            return "unknown words", "correct --set tokens.unk, or give the vocabulary that the model was trained with"
        if len(steps - {0}) == len(steps) == 1 and len(found) > 1:
            return "ids", f"each of your ids is {steps.pop()} more than the tokenizer's: the vocabularies are shifted"
    step = "ids" if len(found) == len(wanted) else "splitting"
    return step, "give the tokenizer that the model was trained with, or --tokenize for a vocabulary without rules"


_OTHER_TARGET = "give the target's tokenizer with the decoder of your code, and leave special tokens out of the text"
_OUTPUTS: dict[str, Callable[[str], str]] = {
    "only the white space around differs: remove strip() from to_text": str.strip,
    "only spaces differ: join tokens as in training": lambda text: text.replace(" ", ""),
    "only lower case differs: return the text of the tokens": str.lower,
}
_CHANGES: dict[str, Callable[[str], str]] = {
    "in lower case, as with --lowercase": str.lower,
    "in Unicode's form NFC": functools.partial(unicodedata.normalize, "NFC"),
    "in Unicode's form NFKC": functools.partial(unicodedata.normalize, "NFKC"),
    "without white space around it": str.strip,
}


def _spelled(around: tuple[Ids, Ids]) -> str:
    words = ("begin with", "end with")
    return " and ".join(f"{word} {', '.join(map(str, ids))}" for word, ids in zip(words, around, strict=True) if ids)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
