"""Build tokenizers from tokens with ids, which do not show how texts are split."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tfexport.errors import CheckpointError, first_line
from tfexport.text.compare import encoded, unlike
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import ODD_TEXTS

_ENGLISH = "basic_english"  # of torchtext
# Regular expressions whose matches are the tokens.
_NAMED = {"words": r"\S+", "chars": r"[\s\S]", _ENGLISH: r"[^\s'.,()!?;:]+|['.,()!?]"}
_TRIED = ("words", "chars", r"\w+|[^\w\s]", r"\w+", _ENGLISH)
# Python's classes for the library, whose own have other characters.
_SPACE = r"\x{9}-\x{d}\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_CLASSES = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", r"\w": r"[\p{L}\p{N}_]", r"\W": r"[^\p{L}\p{N}_]"}
_CLASSES[r"\b"] = r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))".replace(r"\w", _CLASSES[r"\w"])


class Way(NamedTuple):
    """How texts become tokens, and tokens a text."""

    split: str
    lowercase: bool
    is_spaced: bool  # tokens are joined by spaces
    drops_unknown: bool = False  # when they are joined

    def __str__(self) -> str:
        """Return the options that select it."""
        return f"--tokenize {shlex.quote(self.split)}" + " --lowercase" * self.lowercase


class Words(NamedTuple):
    """A vocabulary without rules; `split` is None if nothing shows it."""

    path: Path
    ids: Mapping[str, int]
    unknown: str | None
    special: tuple[str, ...]
    split: str | None

    def ways(self, tokenize: str | None = None, *, lowercase: bool = False, is_recorded: bool = False) -> list[Way]:
        """Return the ways to try; raises CheckpointError if there is only a guess."""
        if not (self.split or tokenize or is_recorded):
            problem = "has tokens and ids, and nothing that shows how to split a text"
            remedy = f"record texts, or give --tokenize {', '.join(_NAMED)} or a regular expression of the tokens"
            raise CheckpointError(problem, subject=f"tokenizer {self.path}", remedy=remedy)
        splits = [tokenize] if tokenize else sorted(_TRIED, key=lambda split: split != self.split)
        cases = (True,) if lowercase else (False,) if tokenize else (False, True)
        ways = [Way(split, case, not re.match(_NAMED.get(split, split), " ")) for split in splits for case in cases]
        return [way for way in ways if tokenize or lowercase or way[:2] != (_ENGLISH, True)]

    def build(self, way: Way) -> bytes:
        """Return the tokenizer.json."""
        inner = Inner(models.WordLevel(dict(self.ids), unk_token=self.unknown or "<unk>"))
        # The library's lower case has no other sigma at the end of a word.
        lower = [normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς"), normalizers.Lowercase()]
        english = [normalizers.Replace('"', ""), normalizers.Replace("<br />", " ")]
        steps: list[Any] = [*lower * (way.lowercase or way.split == _ENGLISH), *english * (way.split == _ENGLISH)]
        if steps:
            inner.normalizer = normalizers.Sequence(steps)
        inner.pre_tokenizer = _splitter(way.split)
        if not way.is_spaced:
            inner.decoder = decoders.Fuse()
        inner.add_special_tokens([*self.special, *([self.unknown] if self.unknown and way.drops_unknown else [])])
        return inner.to_str(pretty=True).encode()


def with_splits(
    read: Mapping[str, bytes | Words],
    tokenize: str | None,
    load: Callable[[Mapping[str, bytes]], Tokenizer] | None,
    *,
    lowercase: bool,
) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Build tokenizers of vocabularies without rules, as the recorded texts show.

    `load` returns a tokenizer with these texts. Also returns notes, and what remains unverified.
    """
    words = {name: one for name, one in read.items() if isinstance(one, Words)}
    if not words and (tokenize or lowercase):
        raise CheckpointError("the tokenizer has its own rules to split texts; leave tokenize and lowercase out")
    ways = {n: one.ways(tokenize, lowercase=lowercase, is_recorded=bool(load)) for n, one in words.items()}
    files = {n: one if isinstance(one, bytes) else one.build(ways[n][0]) for n, one in read.items()}
    notes, others = [f"{one.path.name}: no token is for unknown words" for one in words.values() if not one.unknown], []
    first: list[Way] = []
    for name, one in words.items():
        best = ways[name][0]
        if load:
            tried = {way: load({**files, name: one.build(way)}) for way in [*first, *ways[name]]}
            differences = {way: unlike(tokenizer) for way, tokenizer in tried.items()}
            best = min(tried, key=differences.__getitem__)
            probes = [f"{sample.text}, {sample.text.upper()}'S" for sample in tried[best].text.samples]
            shown = {way: [encoded(tried[way], text) for text in probes] for way in tried if not differences[way][0]}
            others += [str(way) for way, ids in shown.items() if ids != shown[best] and not (tokenize or one.split)]
            first = [best]
            joins = [(spaced, drops) for drops in (False, True) for spaced in (best.is_spaced, not best.is_spaced)]
            built = {one.build(best._replace(is_spaced=spaced, drops_unknown=drops)): 0 for spaced, drops in joins}
            files[name] = min(built, key=lambda raw: unlike(load({**files, name: raw})))
        notes.append(f"{one.path.name}: texts are split by {best}")
    problem = f"the recorded texts also fit {', '.join(others)}; record texts that differ, or give one of them"
    return files, notes, [f"how texts are split: {problem}"] if others else []


def _splitter(split: str) -> pre_tokenizers.PreTokenizer:
    if split in ("words", "chars"):  # as programs without the library read them
        return (
            pre_tokenizers.WhitespaceSplit() if split == "words" else pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        )
    pattern = re.sub(r"(?s)\\.", lambda found: _CLASSES.get(found[0], found[0]), _NAMED.get(split, split))
    return pre_tokenizers.Split(Regex(pattern), "removed", invert=True)


def split_problem(split: str) -> str:
    """Return why `--tokenize` cannot split texts as Python would, or ""."""
    try:
        theirs, ours = re.compile(_NAMED.get(split, split)), _splitter(split)
        pairs = [([m[0] for m in theirs.finditer(t)], [p for p, _ in ours.pre_tokenize_str(t)]) for t in ODD_TEXTS]
    except Exception as error:  # noqa: BLE001 - of either library
        return f"tokenize {split!r} is not {', '.join(_NAMED)} or a regular expression ({first_line(error)})"
    return "" if all(a == b for a, b in pairs) else f"tokenize {split!r} has another meaning in Python; simplify it"
