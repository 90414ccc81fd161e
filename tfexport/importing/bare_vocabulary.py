"""Build tokenizers from tokens with ids, which do not show how texts are split."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


Load = Callable[[Mapping[str, bytes]], Tokenizer]


class Rules(NamedTuple):
    """How texts become tokens, and tokens a text."""

    split: str
    lowercase: bool
    is_spaced: bool  # tokens are joined by spaces
    drops_unknown: bool = False  # when they are joined

    def __str__(self) -> str:
        """Return the options that select it."""
        return f"--tokenize {shlex.quote(self.split)}" + " --lowercase" * self.lowercase


class BareVocabulary(NamedTuple):
    """A vocabulary without rules; `split` is None if nothing shows it."""

    path: Path
    ids: Mapping[str, int]
    unknown: str | None
    special: tuple[str, ...]
    split: str | None

    def candidates(
        self, tokenize: str | None = None, *, lowercase: bool = False, is_recorded: bool = False
    ) -> list[Rules]:
        """Return the rules to try; raises CheckpointError if there is only a guess."""
        if not (self.split or tokenize or is_recorded):
            problem = "has tokens and ids, and nothing that shows how to split a text"
            remedy = f"record texts, or give --tokenize {', '.join(_NAMED)} or a regular expression of the tokens"
            raise CheckpointError(problem, subject=f"tokenizer {self.path}", remedy=remedy)
        splits = [tokenize] if tokenize else sorted(_TRIED, key=lambda split: split != self.split)
        cases = (True,) if lowercase else (False,) if tokenize else (False, True)
        candidates = [
            Rules(split, case, not re.match(_NAMED.get(split, split), " ")) for split in splits for case in cases
        ]
        return [rules for rules in candidates if tokenize or lowercase or rules[:2] != (_ENGLISH, True)]

    def build(self, rules: Rules) -> bytes:
        """Return the tokenizer.json."""
        inner = Inner(models.WordLevel(dict(self.ids), unk_token=self.unknown or "<unk>"))
        # The library's lower case has no other sigma at the end of a word.
        lower = [normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς"), normalizers.Lowercase()]
        english = [normalizers.Replace('"', ""), normalizers.Replace("<br />", " ")]
        steps: list[Any] = [*lower * (rules.lowercase or rules.split == _ENGLISH), *english * (rules.split == _ENGLISH)]
        if steps:
            inner.normalizer = normalizers.Sequence(steps)
        inner.pre_tokenizer = _splitter(rules.split)
        if not rules.is_spaced:
            inner.decoder = decoders.Fuse()
        inner.add_special_tokens([*self.special, *([self.unknown] if self.unknown and rules.drops_unknown else [])])
        return inner.to_str(pretty=True).encode()


def with_rules(
    read: Mapping[str, bytes | BareVocabulary],
    tokenize: str | None,
    load: Load | None,
    *,
    lowercase: bool,
) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Build tokenizers of vocabularies without rules, as the recorded texts show.

    `load` returns a tokenizer with these texts. Also returns notes, and what remains unverified.
    """
    bare = {name: one for name, one in read.items() if isinstance(one, BareVocabulary)}
    if not bare and (tokenize or lowercase):
        raise CheckpointError("the tokenizer has its own rules to split texts; leave tokenize and lowercase out")
    candidates = {n: one.candidates(tokenize, lowercase=lowercase, is_recorded=bool(load)) for n, one in bare.items()}
    files = {n: one if isinstance(one, bytes) else one.build(candidates[n][0]) for n, one in read.items()}
    notes = [f"{one.path.name}: no token is for unknown words" for one in bare.values() if not one.unknown]
    others: list[str] = []
    first: list[Rules] = []
    for name, one in bare.items():
        best = candidates[name][0]
        if load:
            load_one = partial(_load_with, load, files, name)
            best, files[name], also = _fitting(one, [*first, *candidates[name]], load_one)
            others += [] if tokenize or one.split else map(str, also)
            first = [best]
        notes.append(f"{one.path.name}: texts are split by {best}")
    problem = f"the recorded texts also fit {', '.join(others)}; record texts that differ, or give one of them"
    return files, notes, [f"how texts are split: {problem}"] if others else []


def _load_with(load: Load, files: Mapping[str, bytes], name: str, raw: bytes) -> Tokenizer:
    return load({**files, name: raw})


def _fitting(
    vocabulary: BareVocabulary, candidates: Sequence[Rules], load: Callable[[bytes], Tokenizer]
) -> tuple[Rules, bytes, list[Rules]]:
    """Return the rules that fit the recorded texts best, with their tokenizer.json.

    Also returns others that fit all of these texts, but split similar ones differently.
    """
    tried = {rules: load(vocabulary.build(rules)) for rules in candidates}
    differences = {rules: unlike(tokenizer) for rules, tokenizer in tried.items()}
    best = min(tried, key=differences.__getitem__)
    probes = [f"{sample.text}, {sample.text.upper()}'S" for sample in tried[best].text.samples]
    fit = [rules for rules, (texts, *_) in differences.items() if not texts]
    shown = {rules: [encoded(tried[rules], text) for text in probes] for rules in fit}
    joins = [(spaced, drops) for drops in (False, True) for spaced in (best.is_spaced, not best.is_spaced)]
    built = [vocabulary.build(best._replace(is_spaced=spaced, drops_unknown=drops)) for spaced, drops in joins]
    raw = min(dict.fromkeys(built), key=lambda one: unlike(load(one)))
    return best, raw, [rules for rules in fit if shown[rules] != shown[best]]


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
