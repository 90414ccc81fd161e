"""The parts of a tokenizer.json: those that are taken, how large they may be, and how much they make of a text."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfexport.errors import shortened

Part = dict[str, Any]
# Far above all that is known. The limits are there for files that were made to fill the memory or to take for ever.
MAX_PARTS = 64
MAX_PATTERN, MAX_INSERTED = 10_000, 100
MAX_CHARSMAP, MAX_CHARSMAP_ENTRY = 8 * 1024 * 1024, 256
MAX_TOKEN = 10_000
MAX_AROUND = 1_000
MAX_WORD = 1_000
MAX_GROWTH = 100_000


@dataclass(frozen=True)
class Step:
    """A part of the normalizer.

    Attributes:
        times: bytes that it makes of a byte at most.
        inserts: bytes that it may put in where a trial on the whole text does not show it, beside a match of a regex
            or before each part of a text; 0 for none.
        pattern: the text that it replaces, where it is one.
        content: what it replaces it by.
    """

    times: int
    inserts: int = 0
    pattern: str = ""
    content: str = ""

    def most(self, text: str) -> int:
        """Return the bytes that it makes of a text at most."""
        size = num_bytes(text)
        if self.pattern:
            return size + text.count(self.pattern) * max(0, num_bytes(self.content) - num_bytes(self.pattern))
        return size * self.times


@dataclass(frozen=True)
class Parts:
    """What is known of a tokenizer before the library reads it.

    Attributes:
        model: the type of its model.
        steps: of its normalizer.
        split: bytes that its pre-tokenizer makes of a byte at most.
        decoded: bytes of text for a byte of its tokens at most.
        longest: bytes of its longest token at most.
    """

    model: str
    steps: tuple[Step, ...]
    split: int
    decoded: int
    longest: int

    @property
    def growth(self) -> int:
        """Bytes that normalizer and pre-tokenizer make of a byte of any text at most."""
        return math.prod(step.times for step in self.steps) * self.split

    @property
    def unseen(self) -> int:
        """The part of the growth that a trial of the normalizer on a whole text does not show."""
        found, behind = self.split, 1
        for step in reversed(self.steps):
            found *= 1 + step.inserts * behind
            behind *= step.times
        return found


def read_parts(data: object) -> Parts:
    """Read which parts a decoded tokenizer.json has.

    Raises:
        ValueError: it has a part that is not known, one that is larger than any that is, or parts that together make
            far more of a text than any do.
    """
    if not isinstance(data, dict):
        raise ValueError(f"it is {shortened(data)}, expected an object")
    steps = tuple(_looked_up("normalizer", part, _NORMALIZERS) for part in _chain(data, "normalizer", "normalizers"))
    splits = [
        _looked_up("pre_tokenizer", part, _PRE_TOKENIZERS) for part in _chain(data, "pre_tokenizer", "pretokenizers")
    ]
    around = [
        _looked_up("post_processor", part, _POST_PROCESSORS) for part in _chain(data, "post_processor", "processors")
    ]
    decoders = [_looked_up("decoder", part, _DECODERS) for part in _chain(data, "decoder", "decoders")]
    model, longest = _read_model(data.get("model"))
    longest = max([longest, *(num_bytes(content) for content in _added(data.get("added_tokens")))])
    if longest > MAX_TOKEN:
        raise ValueError(f"it has a token of {longest} bytes, expected at most {MAX_TOKEN}")
    if sum(around) > MAX_AROUND:
        raise ValueError(f"post_processor puts {sum(around)} ids around a text, expected at most {MAX_AROUND}")
    parts = Parts(model, steps, math.prod(splits), math.prod(step.times for step in decoders), longest)
    for name, growth in (("normalizer and pre_tokenizer", max(parts.growth, parts.unseen)), ("decoder", parts.decoded)):
        if growth > MAX_GROWTH:
            raise ValueError(f"{name} may make {growth} bytes of one, expected at most {MAX_GROWTH}")
    return parts


def charsmap_growth(raw: bytes) -> int:
    """Return the bytes that a character map of SentencePiece makes of a byte at most.

    It is the length of a trie in bytes, the trie, in words of 32 bits, and what characters become, each text ended by a
    zero; from SentencePiece's normalizer.

    Raises:
        ValueError: it is damaged, or larger than any.
    """
    if len(raw) > MAX_CHARSMAP:
        raise ValueError(f"the character map has {len(raw)} bytes, expected at most {MAX_CHARSMAP}")
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 8 or size % 4 or not 4 <= size <= len(raw) - 4:
        raise ValueError(f"the character map of {len(raw)} bytes says that {size} are its trie")
    longest = max(map(len, raw[4 + size :].split(b"\0")))
    if longest > MAX_CHARSMAP_ENTRY:
        raise ValueError(f"the character map makes {longest} bytes of one, expected at most {MAX_CHARSMAP_ENTRY}")
    return max(1, longest)


def num_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8; of what is no valid Unicode as many as of other characters."""
    return len(text.encode("utf-8", "surrogatepass"))


def _chain(data: Part, name: str, items: str) -> Iterator[Part]:
    """Return the parts under a name one after the other, those of chains in chains too."""
    waiting, count = [data.get(name)], 0
    while waiting:
        part, count = waiting.pop(0), count + 1
        if part is None and count == 1:
            return
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"{name} has {shortened(part)}, expected an object with a type")
        inner = part.get(items) if part["type"] == "Sequence" else []
        if not isinstance(inner, list) or count + len(waiting) + len(inner) > MAX_PARTS:
            raise ValueError(f"{name} is a chain of more than {MAX_PARTS} parts, or none")
        waiting[:0] = inner
        if part["type"] != "Sequence":
            yield part


def _looked_up(name: str, part: Part, known: dict[str, Any]) -> Any:
    """Return what is known of a part by its type."""
    if part["type"] not in known:
        raise ValueError(f"{name} has {shortened(part['type'])}, expected one of {', '.join(sorted(known))}")
    found = known[part["type"]]
    try:
        return found(part) if callable(found) else found
    except ValueError as error:
        raise ValueError(f"{name}: {part['type']}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name} has {shortened(part)}, which is no {part['type']}") from error


def _replace(part: Part) -> Step:
    """A Replace puts a text where another one stands, or where a regex matches, which may be before each character."""
    (kind, pattern), content = _pattern(part["pattern"]), _inserted(part["content"])
    added = num_bytes(content)
    if kind == "String" and pattern:
        return Step(max(1, -(-added // num_bytes(pattern))), pattern=pattern, content=content)
    return Step(1 + added, inserts=added)


def _pattern(pattern: Part) -> tuple[str, str]:
    """Return the kind of a pattern and itself."""
    ((kind, value),) = pattern.items()
    if kind not in ("String", "Regex") or not isinstance(value, str):
        raise ValueError(f"pattern is {shortened(pattern)}, expected a String or a Regex")
    if len(value) > MAX_PATTERN:
        raise ValueError(f"pattern has {len(value)} characters, expected at most {MAX_PATTERN}")
    return kind, value


def _inserted(content: object) -> str:
    """Return what a part puts into a text, None for nothing."""
    if not isinstance(content, str | None):
        raise TypeError
    if num_bytes(content or "") > MAX_INSERTED:
        raise ValueError(f"puts in {num_bytes(content or '')} bytes, expected at most {MAX_INSERTED}")
    return content or ""


def _prepend(part: Part) -> Step:
    added = num_bytes(_inserted(part["prepend"]))
    return Step(1 + added, inserts=added)


def _precompiled(part: Part) -> Step:
    spelled = part["precompiled_charsmap"]
    if len(spelled) > 2 * MAX_CHARSMAP:
        raise ValueError(f"has {len(spelled)} characters, expected at most {2 * MAX_CHARSMAP}")
    try:
        raw = base64.b64decode(spelled, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"precompiled_charsmap is not in base 64 ({error})") from error
    return Step(charsmap_growth(raw))


def _metaspace(part: Part) -> int:
    """The sign of a space in the place of one, and before what begins with none."""
    return 1 + num_bytes(_inserted(part["replacement"]))


def _split(part: Part) -> int:
    _pattern(part["pattern"])
    return 1


def _fixed_length(part: Part) -> int:
    if not part["length"] >= 1:
        raise ValueError(f"length is {shortened(part['length'])}, expected 1 or more")
    return 1


def _template(part: Part) -> int:
    """Return how many ids a template puts around a text."""
    given = part["special_tokens"]
    special = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
    if missing := [name for name in special if name not in given]:
        raise ValueError(f"special_tokens lacks {shortened(missing[0])}, which single has")
    if len(part["single"]) - len(special) != 1:
        raise ValueError(f"single has the text {len(part['single']) - len(special)} times, expected once")
    return sum(len(given[name]["ids"]) for name in special)


# Bytes of UTF-8 that a byte becomes at most: of the forms of Unicode from its FAQ on normalization, of the others from
# what they do, rounded up. A test compares them with the library, character by character.
_NORMALIZERS: dict[str, Step | Callable[[Part], Step]] = {
    "BertNormalizer": Step(8),
    "ByteLevel": Step(2),
    "Lowercase": Step(2),
    "NFC": Step(3),
    "NFD": Step(3),
    "NFKC": Step(11),
    "NFKD": Step(11),
    "Nmt": Step(1),
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
    "Strip": Step(1),
    "StripAccents": Step(1),
}
_PRE_TOKENIZERS: dict[str, int | Callable[[Part], int]] = {
    "BertPreTokenizer": 1,
    "ByteLevel": 4,  # a space in front, then two bytes for one
    "CharDelimiterSplit": 1,
    "Digits": 1,
    "FixedLength": _fixed_length,
    "Metaspace": _metaspace,
    "Punctuation": 1,
    "Split": _split,
    "UnicodeScripts": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
}
_POST_PROCESSORS: dict[str, int | Callable[[Part], int]] = {
    "BertProcessing": 2,
    "ByteLevel": 0,
    "RobertaProcessing": 2,
    "TemplateProcessing": _template,
}
_DECODERS: dict[str, Step | Callable[[Part], Step]] = {
    "BPEDecoder": Step(2),
    "ByteFallback": Step(1),
    "ByteLevel": Step(3),
    "CTC": Step(2),
    "Fuse": Step(1),
    "Metaspace": Step(1),
    "Replace": _replace,
    "Strip": Step(1),
    "WordPiece": Step(2),
}
_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")


def _read_model(model: object) -> tuple[str, int]:
    """Return the type of a model, and the bytes of its longest token at most."""
    if not isinstance(model, dict):
        raise ValueError(f"model is {shortened(model)}, expected an object")
    kind, vocab = _model_type(model), model.get("vocab")
    if kind not in _MODELS:
        raise ValueError(f"model is {shortened(kind)}, expected one of {', '.join(_MODELS)}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        prefix = model.get(name)
        if not isinstance(prefix, str | None) or num_bytes(prefix or "") > MAX_INSERTED:
            raise ValueError(f"{name} is {shortened(prefix)}, expected a text of at most {MAX_INSERTED} bytes")
    limit = model.get("max_input_chars_per_word") or 0
    if not isinstance(limit, int) or limit > MAX_WORD:
        raise ValueError(f"max_input_chars_per_word is {shortened(limit)}, expected at most {MAX_WORD}")
    try:
        # Keys of an object are texts; the pieces of Unigram are pairs of a text and a number.
        tokens = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab or ()]
        return kind, 4 * max(map(len, tokens), default=0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"vocab of the model is {shortened(vocab)}, expected tokens") from error


def _model_type(model: Part) -> object:
    """Return the type of a model; old files do not name it, and the library tells by the keys."""
    if "type" in model:
        return model["type"]
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _added(tokens: object) -> Iterator[str]:
    if not isinstance(tokens, list | None):
        raise ValueError(f"added_tokens is {shortened(tokens)}, expected a list")
    for token in tokens or ():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"added_tokens has {shortened(token)}, expected an object with a content")
        yield token["content"]
