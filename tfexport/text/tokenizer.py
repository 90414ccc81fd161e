"""The tokenizer: convert text to token ids and back, as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tfexport._arguments import as_list
from tfexport.contract import ModelSpec
from tfexport.errors import BundleError, InputError, nth, raise_all, shortened
from tfexport.text.config import TextConfig
from tfexport.text.vocabulary import Vocabulary, need_library, read_plain

MIN_CHARACTER_LIMIT = 10_000
CHARACTERS_PER_TOKEN = 100


class Tokenizer:
    """The vocabularies of source and target and the ids around a text; thread-safe.

    Texts are encoded one by one, because the library's parallel mode warns if the process forks afterwards.

    Attributes:
        text: ids around a text, and recorded texts.
        eos: the target's end token.
        unknown: id of the target's unknown token; None if there is none.
    """

    def __init__(self, source: Vocabulary, target: Vocabulary, spec: ModelSpec, text: TextConfig | None = None) -> None:
        """Combine vocabularies; use `load` or `parse`."""
        self.text = text or TextConfig()
        self.eos, self.unknown = spec.tokens.eos, target.unknown
        self._source, self._target, self._spec = source, target, spec

    @classmethod
    def load(
        cls, path: Path, spec: ModelSpec, *, target: Path | None = None, text: TextConfig | None = None
    ) -> Tokenizer:
        """Read a tokenizer.json of both sides, or of the source if `target` is given."""
        need_library()  # before a missing file is reported
        return cls.parse([(str(file), read_plain(file)) for file in (path, target) if file], spec, text=text)

    @classmethod
    def parse(cls, files: Sequence[tuple[str, bytes]], spec: ModelSpec, *, text: TextConfig | None = None) -> Tokenizer:
        """Read the tokenizer of a model from the bytes of one or two tokenizer.json.

        `files` has pairs of a name for errors and the content; `text` has ids around a text.

        Raises:
            BackendError: the package `tokenizers` is not installed.
            BundleError: a file is damaged or has more tokens than the model, or the model lacks ids around a text.
        """
        (name, raw), *others = files
        text, tokens = text or TextConfig(), spec.tokens
        around = {*text.source_prefix, *text.source_suffix}
        ends = {tokens.pad, tokens.start, tokens.eos}
        # If the target has its own vocabulary, its start and end are ordinary tokens of the source.
        source = Vocabulary.parse(raw, name, {tokens.pad, *around} if others else ends | around, tokens.unk)
        target, theirs = name, source
        for target, own in others:
            theirs = Vocabulary.parse(own, target, ends, tokens.unk)
        sides = [(name, source, "source_vocab", spec.source_vocab)]
        if spec.has_decoder:
            sides.append((target, theirs, "target_vocab", spec.vocab))
        _check_vocabularies(sides)
        _check_around(text, spec)
        return cls(source, theirs, spec, text)

    @property
    def ends_sources(self) -> bool:
        """Whether a source ends with the model's end token."""
        after = (*self._source.added_ids(), *self.text.source_suffix)
        return after[-1:] == (self.eos,)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode sources, with the ids around them.

        Returns:
            1 to max_source_length token ids for each text.

        Raises:
            InputError: there is no text, or lists every text that cannot be encoded; `indices` has their positions.
        """
        given = as_list(texts)
        if given is None:
            got = "one text" if isinstance(texts, str) else shortened(texts)
            raise InputError(f"texts is {got}, expected a list of texts; put it in a list")
        if not given:
            raise InputError("there is no text; give at least one")
        encoded, problems, indices = [], [], []
        for index, text in enumerate(given):
            try:
                encoded.append(self._encode_source(text))
            except InputError as error:
                problems.append(f"{nth('text', index, len(given))} {error}")
                indices.append(index)
        subject = f"input of {len(given)} texts" if len(given) > 1 else "input"
        raise_all(InputError, subject, problems, indices=indices)
        return encoded

    def encode_target(self, text: str) -> list[int]:
        """Encode the beginning of a target, without special tokens.

        Raises:
            InputError: it cannot be encoded, is empty, or leaves no room for a further token.
        """
        try:
            return self._encode_target(text)
        except InputError as error:
            raise InputError(f"prefix {error}") from error

    def begin_target(self, prefix: str = "") -> list[int]:
        """Return the first ids of a target: the target prefix, then the ids of `prefix`."""
        is_empty = type(prefix) is str and not prefix
        return [*self.text.target_prefix, *(() if is_empty else self.encode_target(prefix))]

    def begin_targets(self, prefixes: Sequence[str]) -> list[list[int]]:
        """Return the first ids of each target (see `begin_target`).

        Raises:
            InputError: lists invalid prefixes, equal problems once; `indices` has the positions of all.
        """
        begun, problems, indices = [], dict[str, str](), []
        for index, prefix in enumerate(prefixes):
            try:
                begun.append(self.begin_target(prefix))
            except InputError as error:
                problems.setdefault(str(error), f"{index + 1}: {error}")
                indices.append(index)
        if len(problems) == 1 and len(indices) == len(prefixes):
            raise InputError(*problems, indices=indices)
        raise_all(InputError, "prefixes", list(problems.values()), indices=indices)
        return begun

    def encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], subject: str
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode sources with the ids around them, and targets without special tokens.

        Raises:
            InputError: lists every text that cannot be encoded; begins with `subject`; `indices` has the positions.
        """
        pairs: tuple[list[list[int]], list[list[int]]] = ([], [])
        encoders: list[Callable[[str], list[int]]] = [self._encode_source, self._encode_target]
        problems, indices = [], []
        for index, texts in enumerate(zip(sources, targets, strict=True)):
            pair = f"pair {index + 1}: " if len(sources) > 1 else ""
            for side, encode, text, encoded in zip(("source", "target"), encoders, texts, pairs, strict=True):
                try:
                    encoded.append(encode(text))
                except InputError as error:
                    problems.append(f"{pair}{side} {error}")
                    indices.append(index)
        raise_all(InputError, subject, problems, indices=indices)
        return pairs

    def target_id(self, token: str) -> int:
        """Return the id of a target token, such as a language; raises InputError."""
        found = self._target.id_of(token)
        if found is None:
            raise InputError(f"token {token!r} is none of the target's vocabulary; give one of its tokens, or an id")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Convert target ids to text, without special tokens and unassigned ids."""
        return self._target.decode(ids)

    def decode_with(self, ids: Sequence[int], tokens: Mapping[int, str]) -> str:
        """Convert target ids to text, replacing the tokens at some positions."""
        return self._target.decode_with(ids, tokens)

    def copies(self, text: str) -> list[str | None]:
        """Return the text to copy into a target for each source id.

        This is the token itself if it is known and source and target spell tokens alike, or else the part of the text.
        For ids around the text it is None.
        """
        pieces = self._source.pieces(text, spelled=self._source.decodes_like(self._target))
        return [*[None] * len(self.text.source_prefix), *pieces, *[None] * len(self.text.source_suffix)]

    def tokens(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return source and target tokens as the vocabularies spell them."""
        return tuple(map(self._source.token, source_ids)), tuple(map(self._target.token, target_ids))

    def _encode_source(self, text: str) -> list[int]:
        self._check(text)
        own = self._source.encode(text, special=True)
        ids = [*self.text.source_prefix, *own, *self.text.source_suffix]
        _check_length(ids, self._spec.max_source_length)
        return ids

    def _encode_target(self, text: str) -> list[int]:
        self._check(text)
        ids = self._target.encode(text, special=False)
        _check_length(ids, self._spec.max_target_length - 1 - len(self.text.target_prefix))
        return ids

    def _check(self, text: object) -> None:
        _check_text(text, max(MIN_CHARACTER_LIMIT, CHARACTERS_PER_TOKEN * self._spec.max_source_length))


def _check_length(ids: Sequence[int], limit: int) -> None:
    if len(ids) > limit:
        raise InputError(f"has {len(ids)} tokens, the limit is {limit}; shorten it")


def _check_vocabularies(sides: Sequence[tuple[str, Vocabulary, str, int]]) -> None:
    problems: dict[str, list[str]] = {}
    for file, vocabulary, name, size in sides:
        if vocabulary.largest_id >= size:
            said = f"ids reach to {vocabulary.largest_id}, but the model's {name} is {size}"
            problems.setdefault(file, []).append(said)
    if problems:
        listed = "; ".join(f"{file}: {'; '.join(said)}" for file, said in problems.items())
        raise BundleError(f"{listed}; use the tokenizer that the model was trained with")


def _check_around(text: TextConfig, spec: ModelSpec) -> None:
    problems = [
        f"{name} has id {max(ids)}, the vocabulary has {size}"
        for name, size in (
            ("source_prefix", spec.source_vocab),
            ("source_suffix", spec.source_vocab),
            ("target_prefix", spec.vocab),
        )
        if (ids := getattr(text, name)) and max(ids) >= size
    ]
    if problems:
        raise BundleError(f"text: {'; '.join(problems)}; give ids of this model")


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
