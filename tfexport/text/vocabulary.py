"""One tokenizer.json made safe for text of any origin."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfexport._io.extras import extra_command
from tfexport.errors import BackendError, BundleError, InputError
from tfexport.text.border import border
from tfexport.text.parts import Parts, num_bytes, read_parts

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 256 * 1024 * 1024
# Bytes that a text may have when it comes to the model of the tokenizer, and within a step of its normalizer. Of the
# first each takes up to 450 bytes where all characters are split, of the second some 40.
MAX_NORMALIZED, MAX_STEP = 2 * 1024 * 1024, 4 * 1024 * 1024
# A token of this name, which no text becomes, is the first of those that split texts and that the model has no id for.
BEYOND = " beyond the model's vocabulary"


class Vocabulary:
    """A tokenizer.json of Hugging Face `tokenizers`; may be shared between threads.

    - Text never becomes a special token: "</s>" in a text is read as the
      characters it consists of, or as unknown where the vocabulary holds it whole.
    - Nothing is cut, padded or drawn at random, whatever the file says.
    - Pieces behind the token `BEYOND` become the unknown token.
    - Characters outside the vocabulary become the unknown token. A vocabulary
      without one would drop them silently, so such a text is refused.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        model: dict[str, Any],
        parts: Parts,
        special: Collection[int],
        unknown: int | None,
    ) -> None:
        """Wrap `inner`; use `parse`.

        Args:
            inner: the library's tokenizer.
            model: "model" of its tokenizer.json.
            parts: of the file.
            special: ids that no text becomes and that no text shows, besides those that the file names.
            unknown: id of what is not known where the file names none; None where there is none.
        """
        self._inner, self._parts = inner, parts
        own_unknown = _unknown_id(inner, model)
        self._unknown = unknown if own_unknown is None else own_unknown
        added = inner.get_added_tokens_decoder()
        self._beyond = inner.token_to_id(BEYOND)
        self._special = frozenset({*special, *(i for i, t in added.items() if t.special)} - {self._unknown})
        self._unseen = self._special | {i for i, t in added.items() if t.special}
        self._plain_added = [token.content for token in added.values() if not token.special]
        drops_unknown = parts.model == "BPE" and own_unknown is None and not model.get("byte_fallback")
        self._bpe = model if drops_unknown else None

    @classmethod
    def parse(cls, raw: bytes, name: str, special: Collection[int], unknown: int | None) -> Vocabulary:
        """Read the bytes of a tokenizer.json; see the constructor for the rest.

        Args:
            raw: the file.
            name: of it, for errors.
            special: see the constructor.
            unknown: likewise.

        Raises:
            BackendError: the package `tokenizers` is not installed.
            BundleError: it is damaged, or has parts that `read_parts` refuses.
        """
        library = need_library()

        def refused(reason: str) -> BundleError:
            return BundleError(f"{name} is no tokenizer.json ({reason}); save the tokenizer again")

        with border(refused):
            text = raw.decode("utf-8")
            data = json.loads(text)
            parts = read_parts(data)
            inner = library.Tokenizer.from_str(text)
            inner.no_padding()
            inner.no_truncation()
            inner.encode_special_tokens = True
            if data["model"].get("dropout"):
                inner.model.dropout = None
            return cls(inner, data["model"], parts, special, unknown)

    @property
    def largest_id(self) -> int:
        """The largest id that a text can become."""
        if self._beyond is not None:
            return self._beyond - 1
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def added_ids(self) -> list[int]:
        """The ids that the file puts around a text, in order."""
        with border(_not_encoded):
            ids: list[int] = self._inner.encode("", add_special_tokens=True).ids
        return ids

    @property
    def decoded_bytes(self) -> int:
        """Bytes of text that a token may become."""
        return self._parts.longest * self._parts.decoded

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, such as a language; None where there is none."""
        found: int | None = self._inner.token_to_id(token)
        return None if found is None or (self._beyond is not None and found >= self._beyond) else found

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode one text; `special` adds the tokens that the file puts around it.

        Raises:
            InputError: the vocabulary cannot say it; the error has no subject.
        """
        with border(_not_encoded):
            self._check_growth(text)
            lost = self._lost_characters(text)
        if lost:
            raise InputError(f"has {lost}, which the vocabulary lacks and would drop; leave that out")
        with border(_not_encoded):
            encoding = self._inner.encode(text, add_special_tokens=special)
        from_text = [not added for added in encoding.special_tokens_mask]
        ids = [
            self._as_text(i) if is_text and self._is_none_of_text(i) else i
            for i, is_text in zip(encoding.ids, from_text, strict=True)
        ]
        if all(i == self._unknown for i, is_text in zip(ids, from_text, strict=True) if is_text):
            raise InputError("has no character that the vocabulary knows; give a text that the model was trained for")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, leaving out special tokens and ids that have no token."""
        with border(_not_decoded):
            return self._inner.decode([int(i) for i in ids if i not in self._special], skip_special_tokens=True)

    @property
    def unknown(self) -> int | None:
        """The id of what is not known; None where there is none."""
        return self._unknown

    def decodes_like(self, other: Vocabulary) -> bool:
        """Say whether two vocabularies spell their tokens alike, such as with "▁" in front of a word."""
        ours, theirs = (one._inner.decoder and one._inner.decoder.__getstate__() for one in (self, other))
        return bool(ours == theirs)

    def decode_with(self, ids: Sequence[int], tokens: Mapping[int, str]) -> str:
        """Do what `decode` does, with other tokens in some places.

        Args:
            ids: of a target.
            tokens: as this vocabulary would spell them, by place.
        """
        spelled = [
            tokens.get(place, "" if token in self._unseen else self.token(token)) for place, token in enumerate(ids)
        ]
        seen = [token for token in spelled if token]
        with border(_not_decoded):
            text: str = self._inner.decoder.decode(seen) if self._inner.decoder else " ".join(seen)
        return text

    def pieces(self, text: str, *, spelled: bool) -> list[str | None]:
        """Say what each id of `encode(text, special=True)` stands for: None for those around the text.

        Args:
            text: that was encoded.
            spelled: give tokens as the vocabulary spells them, and only of unknown ones what stands in the text; else
                what stands in the text of all.
        """
        with border(_not_encoded):
            encoding = self._inner.encode(text, add_special_tokens=True)
        found: list[str | None] = []
        rows = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
        for token_id, token, (first, last), is_added in rows:
            is_known = token_id != self._unknown and not self._is_none_of_text(token_id)
            said = text[first:last].strip() or text[first:last]
            found.append(None if is_added else token if spelled and is_known else said)
        return found

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; "" where there is none of that id."""
        return self._inner.id_to_token(token_id) or ""

    def _is_none_of_text(self, token: int) -> bool:
        return token in self._special or (self._beyond is not None and token >= self._beyond)

    def _as_text(self, special: int) -> int:
        """Return what stands for a special token that was spelled out in a text, or for a piece that has no id."""
        if self._unknown is None:
            raise InputError(f"has {self._inner.id_to_token(special)!r}, which has a special meaning; leave it out")
        return self._unknown

    def _check_growth(self, text: str) -> None:
        """Refuse a text that becomes too large, before it does.

        What the parts of the tokenizer can make of any text is known; where that is too much, the normalizer is tried
        step by step, each only as far as it cannot make too much.
        """
        size = num_bytes(text)
        if size * self._parts.growth <= MAX_NORMALIZED:
            return
        for step, normalizer in zip(self._parts.steps, _normalizers(self._inner.normalizer), strict=True):
            size = step.most(text)
            if size <= MAX_STEP:
                text = normalizer.normalize_str(text)
                size = num_bytes(text)
            if size * self._parts.unseen > MAX_NORMALIZED:
                break
        if size * self._parts.unseen > MAX_NORMALIZED:
            raise InputError(
                f"may become {size * self._parts.unseen} bytes before it is split into tokens, the limit is "
                f"{MAX_NORMALIZED}; split it"
            )

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


def need_library() -> Any:
    """Import `tokenizers`.

    Raises:
        BackendError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise BackendError(f"the package tokenizers is not installed; {extra_command('')}") from error
    return tokenizers


def _normalizers(normalizer: Any) -> Iterator[Any]:
    """Return the parts of a normalizer one after the other, in the order of `Parts.steps`."""
    from tokenizers.normalizers import Sequence as Chain

    if isinstance(normalizer, Chain):
        for place in range(len(normalizer)):
            yield from _normalizers(normalizer[place])
    elif normalizer is not None:
        yield normalizer


def _not_encoded(reason: str) -> InputError:
    return InputError(f"cannot be encoded ({reason}); leave out what the vocabulary lacks")


def _not_decoded(reason: str) -> InputError:
    return InputError(f"token ids cannot be decoded ({reason}); give the tokenizer that the model was trained with")


def _unknown_id(inner: tokenizers.Tokenizer, model: dict[str, Any]) -> int | None:
    """Return the id that the tokenizer gives to what it does not know, None when it has none."""
    token, unknown = model.get("unk_token"), model.get("unk_id")
    return unknown if token is None else inner.token_to_id(token)


def read_plain(path: Path) -> bytes:
    """Read a tokenizer.json.

    Raises:
        BundleError: it is no plain file, too large, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a plain file; save the tokenizer again")
        if status.st_size > MAX_BYTES:
            raise BundleError(f"{path} has {status.st_size} bytes, the limit is {MAX_BYTES}; save the tokenizer again")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}; check the file") from error
