"""Encode untrusted text with an untrusted tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfexport._io.extras import extra_command
from tfexport._io.process import ProcessError, call_in_process
from tfexport.errors import BackendError, BundleError, InputError, TfexportError, shortened

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 256 * 1024 * 1024
_MAX_REASON = 500  # characters
# Pieces from this token on have no id in the model.
BEYOND = " beyond the model's vocabulary"


class Vocabulary:
    """A tokenizer.json of Hugging Face `tokenizers`; may be shared between threads.

    - Text never becomes a special token: "</s>" in a text is encoded as its characters, or as unknown if the vocabulary
      has it as one token.
    - Truncation, padding and dropout of the file are switched off.
    - Pieces with ids from the token `BEYOND` on become the unknown token.
    - Characters outside the vocabulary become the unknown token. A vocabulary without one would drop them silently, so
      such a text is rejected.
    """

    def __init__(self, raw: bytes, name: str, special: Collection[int] = (), unknown: int | None = None) -> None:
        """Read the bytes of a tokenizer.json; errors begin with `name`.

        `special` are additional special tokens; `unknown` is the unknown token if the file names none.
        """
        library = need_library()

        def damaged(reason: str) -> BundleError:
            return BundleError(f"{name} is not a valid tokenizer.json ({reason}); save the tokenizer again")

        if len(raw) > MAX_BYTES:
            raise damaged(f"it has {len(raw)} bytes, the limit is {MAX_BYTES}")
        with errors_as(damaged):
            text = raw.decode("utf-8")
            self._inner: tokenizers.Tokenizer = library.Tokenizer.from_str(text)
            self._inner.no_padding()
            self._inner.no_truncation()
            self._inner.encode_special_tokens = True
            model = json.loads(text)["model"]
            if model.get("dropout"):
                self._inner.model.dropout = None
            token = model.get("unk_token")
            own_unknown: int | None = model.get("unk_id") if token is None else self._inner.token_to_id(token)
            self.unknown = unknown if own_unknown is None else own_unknown
            self._beyond: int | None = self._inner.token_to_id(BEYOND)
            added = self._inner.get_added_tokens_decoder()
            added_special = {i for i, token in added.items() if token.special}
            self._special = {*special, *added_special} - {self.unknown}
            self._hidden = self._special | added_special
            self._plain_added = [token.content for token in added.values() if not token.special]
            is_bpe = type(self._inner.model).__name__ == "BPE"
            self._bpe = model if is_bpe and own_unknown is None and not model.get("byte_fallback") else None

    @property
    def largest_id(self) -> int:
        """The largest id that a text can become."""
        if self._beyond is not None:
            return self._beyond - 1
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def added_ids(self) -> list[int]:
        """Return the ids that the file adds around a text, in order."""
        return self._encoding("", special=True).ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if it is unknown."""
        found: int | None = self._inner.token_to_id(token)
        return None if found is None or (self._beyond is not None and found >= self._beyond) else found

    def token(self, token_id: int) -> str:
        """Return the token of an id; "" for an unassigned id."""
        return self._inner.id_to_token(token_id) or ""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode one text; `special` adds the tokens that the file defines around it."""
        if self._bpe is not None:
            with errors_as(_not_encoded):
                lost = self._lost_characters(text)
            if lost:
                raise InputError(f"has {lost}, which the vocabulary lacks and would drop; remove it")
        encoding = self._encoding(text, special=special)
        ids, is_added = encoding.ids, encoding.special_tokens_mask
        own = {i for i, added in zip(ids, is_added, strict=True) if not added}
        if any(map(self._is_reserved, own)):
            ids = [i if added else self._as_text(i) for i, added in zip(ids, is_added, strict=True)]
            own = {self._as_text(i) for i in own}
        if own <= {self.unknown}:
            raise InputError("has no character of the vocabulary; give a text like those that the model was trained on")
        return ids

    def raw_ids(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, also those beyond the model's vocabulary."""
        return self._encoding(text, special=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to text, without special tokens and unassigned ids."""
        with errors_as(_not_decoded):
            return self._inner.decode([int(i) for i in ids if i not in self._special], skip_special_tokens=True)

    def decode_with(self, ids: Sequence[int], tokens: Mapping[int, str]) -> str:
        """Decode ids, replacing the tokens at some positions."""
        own = ["" if token in self._hidden else self.token(token) for token in ids]
        seen = [token for token in (tokens.get(place, token) for place, token in enumerate(own)) if token]
        with errors_as(_not_decoded):
            text: str = self._inner.decoder.decode(seen) if self._inner.decoder else " ".join(seen)
        return text

    def decodes_like(self, other: Vocabulary) -> bool:
        """Return whether two vocabularies spell tokens alike (such as "▁" before a word)."""
        ours, theirs = (one._inner.decoder and one._inner.decoder.__getstate__() for one in (self, other))
        return bool(ours == theirs)

    def pieces(self, text: str, *, spelled: bool) -> list[str | None]:
        """Return the text of each id, or with `spelled` its token if known."""
        encoding = self._encoding(text, special=True)
        found: list[str | None] = []
        rows = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
        for token_id, token, (first, last), is_added in rows:
            is_known = token_id != self.unknown and not self._is_reserved(token_id)
            part = text[first:last].strip() or text[first:last]
            found.append(None if is_added else token if spelled and is_known else part)
        return found

    def _encoding(self, text: str, *, special: bool) -> tokenizers.Encoding:
        with errors_as(_not_encoded):
            return self._inner.encode(text, add_special_tokens=special)

    def _is_reserved(self, token: int) -> bool:
        return token in self._special or (self._beyond is not None and token >= self._beyond)

    def _as_text(self, token: int) -> int:
        """Return an id that a text may have: the unknown token for a reserved one."""
        if not self._is_reserved(token):
            return token
        if self.unknown is None:
            raise InputError(f"has {self._inner.id_to_token(token)!r}, which has a special meaning; leave it out")
        return self.unknown

    def _lost_characters(self, text: str) -> str:
        """List the characters that byte-pair encoding without an unknown token would drop.

        Like the library, it looks up characters with the prefix after a word's start, and with the suffix at its end.
        """
        assert self._bpe is not None
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


@contextmanager
def errors_as(error_of: Callable[[str], TfexportError]) -> Iterator[None]:
    """Convert exceptions and Rust panics of `tokenizers` with `error_of(reason)`."""
    try:
        yield
    except TfexportError:
        raise
    except Exception as error:
        raise error_of(_one_line(error) or type(error).__name__) from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise error_of(f"tokenizers panicked: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    # The library quotes the file, which may be of any size.
    return " ".join(str(error)[:_MAX_REASON].split())


def _is_panic(error: BaseException | None) -> bool:
    # The class of panics cannot be imported.
    return type(error).__module__ == "pyo3_runtime"


def need_library() -> Any:
    """Import `tokenizers`; raises BackendError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise BackendError(f"the package tokenizers is not installed; {extra_command('')}") from error
    return tokenizers


def _not_encoded(reason: str) -> InputError:
    return InputError(f"cannot be encoded ({reason}); remove characters that the vocabulary lacks")


def _not_decoded(reason: str) -> InputError:
    return InputError(f"token ids cannot be decoded ({reason}); give the tokenizer that the model was trained with")


def read_plain(path: Path) -> bytes:
    """Read a tokenizer.json."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise BundleError(f"{path} is not a regular file of at most {MAX_BYTES} bytes; save the tokenizer again")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}; check the file") from error


TRIAL_MEMORY, TRIAL_MEMORY_PER_BYTE = 2 * 1024**3, 8
TRIAL_CPU_S, _TRIAL_WALL_S = 30, 600
_REMEDY = "give the tokenizer that the model was trained with"
# Texts that often break normalizers and regexes; each is below every model's limit.
ODD_TEXTS = (
    "",
    " ",
    "The quick brown fox, 12.345 times!",
    "Größe café ﬁ ½ ﷺ İ ẞ ﬃ ＡＢＣ ①",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "السلام عليكم שלום नमस्ते สวัสดี",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301\u0302\u0303 \u202eright to left\u202c \ufeff\u200b\u00ad",
    "\0\x01\x1b\x7f\x85\u2028\uffff\U0010ffff\ue000",
    "</s><pad><unk> ▁▁ Ġ ## @@ <0x0A>",
    "line\nbreak\r\n\ttab  two   three",
    *(char * 2000 + end for char, end in (("a", "!"), ("1", "!"), ("!", "a"), (" ", "a"), ("é", "!"), ("中", "!"))),
    "ab " * 700,
    "aA1 _-" * 350,
    "a" + "\u0301" * 2000,
)
# Hashes of tokenizers that have passed in this process.
_passed: set[bytes] = set()


def try_tokenizer(raw: bytes, name: str) -> None:
    """Encode and decode unusual texts with an untrusted tokenizer, in a subprocess.

    Raises:
        BundleError: it is damaged or panics, or needs more than 30 s of CPU time or more memory than 2 GiB plus eight
            times its size. On systems that cannot limit these, it has ten minutes.
    """
    digest = hashlib.sha256(raw).digest()
    if digest in _passed:
        return
    limits = {"memory_bytes": TRIAL_MEMORY + TRIAL_MEMORY_PER_BYTE * len(raw), "cpu_s": TRIAL_CPU_S}
    try:
        call_in_process("tfexport.text.vocabulary:_try", name, **limits, wall_s=_TRIAL_WALL_S, data=raw)
    except ProcessError as error:
        raise BundleError(f"{name}: a trial with short texts {error}; {_REMEDY}") from error
    _passed.add(digest)


def _try(name: str, raw: bytes) -> None:
    vocabulary = Vocabulary(raw, name)
    for text in ODD_TEXTS:
        try:
            ids = vocabulary.encode(text, special=True)
            vocabulary.pieces(text, spelled=True)
            vocabulary.decode(ids)
        except InputError as error:  # the vocabulary may lack the characters
            if _is_panic(error.__cause__) or isinstance(error.__cause__, MemoryError):
                raise BundleError(f"{name} fails at the text {shortened(text)} ({error}); {_REMEDY}") from error
