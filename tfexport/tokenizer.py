"""The tokenizer: text to token ids and back, by the tokenizer.json of Hugging Face `tokenizers`."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfexport.errors import BackendError, BundleError, InputError, raise_all
from tfexport.install import extra_command
from tfexport.spec import ModelSpec

if TYPE_CHECKING:
    import tokenizers

MIN_CHARACTER_LIMIT = 10_000
CHARACTERS_PER_TOKEN = 100
MAX_BYTES = 256 * 1024 * 1024


class Tokenizer:
    """A tokenizer.json made safe for text of any origin; may be shared between threads.

    - Text never becomes a special token: "</s>" in a text is read as the
      characters it consists of, or as unknown where the vocabulary holds it whole.
    - Nothing is cut, padded or drawn at random, whatever the file says.
    - Characters outside the vocabulary become the unknown token. A vocabulary
      without one would drop them silently, so such a text is refused.

    Texts are encoded one by one: the library's parallel mode warns when the
    process forks afterwards.
    """

    def __init__(self, inner: tokenizers.Tokenizer, model: dict[str, Any], spec: ModelSpec) -> None:
        """Wrap `inner`, whose "model" in tokenizer.json is `model`; use `load`."""
        self._inner = inner
        self._spec = spec
        own_unknown = _unknown_id(inner, model)
        self._unknown = spec.tokens.unk if own_unknown is None else own_unknown
        added = inner.get_added_tokens_decoder()
        special = {spec.tokens.pad, spec.tokens.start, spec.tokens.eos, *(i for i, t in added.items() if t.special)}
        self._special = frozenset(special - {self._unknown})
        self._plain_added = [token.content for token in added.values() if not token.special]
        drops_unknown = model.get("type") == "BPE" and own_unknown is None and not model.get("byte_fallback")
        self._bpe = model if drops_unknown else None

    @classmethod
    def load(cls, path: Path, spec: ModelSpec) -> Tokenizer:
        """Read a tokenizer.json for the model that `spec` describes.

        Raises:
            BackendError: the package `tokenizers` is not installed.
            BundleError: the file is missing, damaged or has more tokens than the model.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise BackendError(f"the package tokenizers is not installed; {extra_command('')}") from error
        raw = _read(path)
        try:
            text = raw.decode("utf-8")
            inner = tokenizers.Tokenizer.from_str(text)
            model = json.loads(text)["model"]
        except Exception as error:  # the library raises nothing more special
            reason = " ".join(str(error).split())
            raise BundleError(f"{path} is no tokenizer.json ({reason}); save the tokenizer again") from error
        _check_vocabulary(inner, spec, path)
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        if model.get("dropout"):
            inner.model.dropout = None
        return cls(inner, model, spec)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode sources, with the special tokens that the tokenizer puts around them.

        Args:
            texts: at least one.

        Returns:
            Token ids of each text, 1 … max_source_length of them.

        Raises:
            InputError: lists every text, counted from 1, that is empty, too long or
                that the vocabulary cannot say.
        """
        if isinstance(texts, str):
            raise InputError("texts is one text, expected a list of texts; put it in a list")
        if not texts:
            raise InputError("there is no text; give at least one")
        encoded, problems = [], []
        for number, text in enumerate(texts, 1):
            try:
                encoded.append(self._encode(text, self._spec.max_source_length, special=True))
            except InputError as error:
                problems.append(f"text {number} {error}")
        raise_all(InputError, f"input of {len(texts)} texts" if len(texts) > 1 else "input", problems)
        return encoded

    def encode_target(self, text: str) -> list[int]:
        """Encode what a target shall begin with, without special tokens.

        Raises:
            InputError: it is empty, leaves no room for a further token, or the vocabulary cannot say it.
        """
        try:
            return self._encode(text, self._spec.max_target_length - 1, special=False)
        except InputError as error:
            raise InputError(f"prefix {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, leaving out special tokens and ids that have no token."""
        return self._inner.decode([int(i) for i in ids if i not in self._special], skip_special_tokens=True)

    def _encode(self, text: str, limit: int, *, special: bool) -> list[int]:
        """Encode one text; the error has no subject."""
        _check_text(text, max(MIN_CHARACTER_LIMIT, CHARACTERS_PER_TOKEN * self._spec.max_source_length))
        if lost := self._lost_characters(text):
            raise InputError(f"has {lost}, which the vocabulary lacks and would drop; leave that out")
        try:
            encoding = self._inner.encode(text, add_special_tokens=special)
        except Exception as error:  # the library raises nothing more special
            raise InputError(f"cannot be encoded ({error}); leave out what the vocabulary lacks") from error
        from_text = [not added for added in encoding.special_tokens_mask]
        ids = [
            self._as_text(i) if is_text and i in self._special else i
            for i, is_text in zip(encoding.ids, from_text, strict=True)
        ]
        if all(i == self._unknown for i, is_text in zip(ids, from_text, strict=True) if is_text):
            raise InputError("has no character that the vocabulary knows; give a text that the model was trained for")
        if len(ids) > limit:
            raise InputError(f"has {len(ids)} tokens, the limit is {limit}; shorten it")
        return ids

    def _as_text(self, special: int) -> int:
        """Return what a special token stands for that was spelled out in a text."""
        if self._unknown is None:
            raise InputError(f"has {self._inner.id_to_token(special)!r}, which has a special meaning; leave it out")
        return self._unknown

    def _lost_characters(self, text: str) -> str:
        """Name the characters of `text` that byte-pair encoding without an unknown token would drop.

        Follows its lookup of single characters: the prefix goes before every one
        but a word's first, the suffix behind a word's last.
        """
        if self._bpe is None:
            return ""
        for token in self._plain_added:
            text = text.replace(token, " ")
        vocab, prefix = self._bpe["vocab"], self._bpe.get("continuing_subword_prefix") or ""
        suffix, whole = self._bpe.get("end_of_word_suffix") or "", self._bpe.get("ignore_merges")
        lost = {
            char
            for word in self._words(text)
            if not (whole and word in vocab)
            for i, char in enumerate(word)
            if (prefix if i else "") + char + (suffix if i == len(word) - 1 else "") not in vocab
        }
        return ", ".join(repr(char) for char in sorted(lost)[:10])

    def _words(self, text: str) -> list[str]:
        if self._inner.normalizer is not None:
            text = self._inner.normalizer.normalize_str(text)
        if self._inner.pre_tokenizer is None:
            return [text]
        return [word for word, _ in self._inner.pre_tokenizer.pre_tokenize_str(text)]


def _unknown_id(inner: tokenizers.Tokenizer, model: dict[str, Any]) -> int | None:
    """Return the id that the tokenizer gives to what it does not know, None when it has none."""
    token, unknown = model.get("unk_token"), model.get("unk_id")
    return unknown if token is None else inner.token_to_id(token)


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a plain file; save the tokenizer again")
        if status.st_size > MAX_BYTES:
            raise BundleError(f"{path} has {status.st_size} bytes, the limit is {MAX_BYTES}; save the tokenizer again")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}; check the file") from error


def _check_vocabulary(inner: tokenizers.Tokenizer, spec: ModelSpec, path: Path) -> None:
    largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
    sizes = {"source_vocab": spec.source_vocab} | ({"target_vocab": spec.vocab} if spec.has_decoder else {})
    problems = [
        f"ids reach to {largest}, but the model's {name} is {size}" for name, size in sizes.items() if largest >= size
    ]
    if problems:
        raise BundleError(f"{path}: {'; '.join(problems)}; use the tokenizer that the model was trained with")


def _check_text(text: object, limit: int) -> None:
    if not isinstance(text, str):
        raise InputError(f"is {type(text).__name__}, expected a text")
    if not text:
        raise InputError("is empty; leave it out")
    if len(text) > limit:
        raise InputError(f"has {len(text)} characters, the limit is {limit}; split it")
    if text.isspace():
        raise InputError("is white space only; leave it out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"has {text[error.start]!a} at character {error.start}, which is not valid Unicode; read it as UTF-8"
        ) from error
