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
    """

    def __init__(self, source: Vocabulary, target: Vocabulary, spec: ModelSpec, text: TextConfig | None = None) -> None:
        """Combine vocabularies; use `load` or `parse`."""
        self.text = text or TextConfig()
        self.eos, self.unknown = spec.tokens.eos, target.unknown  # ids of the target
        self.source_unknown = source.unknown
        self._source, self._target, self._spec = source, target, spec
        self._max_characters = max(MIN_CHARACTER_LIMIT, CHARACTERS_PER_TOKEN * spec.max_source_length)

    @classmethod
    def load(
        cls, path: Path, spec: ModelSpec, *, target: Path | None = None, text: TextConfig | None = None
    ) -> Tokenizer:
        """Read a tokenizer.json of both sides, or of the source if `target` is given."""
        need_library()  # before a missing file is reported
        return cls.parse([(str(file), read_plain(file)) for file in (path, target) if file], spec, text=text)

    @classmethod
    def parse(cls, files: Sequence[tuple[str, bytes]], spec: ModelSpec, *, text: TextConfig | None = None) -> Tokenizer:
        """Read one or two tokenizer.json, given as a name for errors and the content.

        Raises:
            BundleError: a file is damaged or has more tokens than the model, or the model lacks ids around a text.
        """
        text, tokens, is_shared = text or TextConfig(), spec.tokens, len(files) == 1
        (source_name, source_raw), (target_name, target_raw) = files[0], files[-1]
        ends = {tokens.pad, tokens.start, tokens.eos}
        if spec.speech:
            ends |= {*spec.speech.ids, *range(spec.speech.first_timestamp or spec.vocab, spec.vocab)}
        # If the target has its own vocabulary, its start and end are ordinary tokens of the source.
        special = {*text.source_prefix, *text.source_suffix, *(ends if is_shared else {tokens.pad})}
        source = Vocabulary(source_raw, source_name, special, tokens.unk)
        target = source if is_shared else Vocabulary(target_raw, target_name, ends, tokens.unk)
        sides = [(source_name, source, "source_vocab", spec.source_vocab)] if spec.source_vocab else []
        if spec.has_decoder:
            sides.append((target_name, target, "target_vocab", spec.vocab))
        _check_sizes(sides)
        _check_around(text, spec)
        return cls(source, target, spec, text)

    @property
    def ends_sources(self) -> bool:
        """Whether a source ends with the model's end token."""
        after = (*self._source.added_ids(), *self.text.source_suffix)
        return after[-1:] == (self.eos,)

    def encode(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode sources, with the ids around them.

        Raises:
            InputError: there is no text, or lists every text that cannot be encoded; `indices` has their positions.
        """
        values = as_list(texts)
        if values is None:
            got = "one text" if isinstance(texts, str) else shortened(texts)
            raise InputError(f"texts is {got}, expected a list of texts; put it in a list")
        if not values:
            raise InputError("there is no text; give at least one")
        encoded, errors = _encode_each(self._encode_source, values)
        subject = f"input of {len(values)} texts" if len(values) > 1 else "input"
        problems = [f"{nth('text', index, len(values))} {error}" for index, error in errors.items()]
        raise_all(InputError, subject, problems, indices=errors)
        return encoded

    def encode_target(self, text: str) -> list[int]:
        """Encode the beginning of a target, without special tokens; raises InputError."""
        try:
            return self._encode_target(text)
        except InputError as error:
            raise InputError(f"prefix {error}") from error

    def begin_target(self, prefix: str = "") -> list[int]:
        """Return the first ids of a target: the target prefix, then the ids of `prefix`."""
        is_empty = type(prefix) is str and not prefix
        return [*self.text.target_prefix, *(() if is_empty else self.encode_target(prefix))]

    def begin_targets(self, prefixes: Sequence[str]) -> list[list[int]]:
        """Return the first ids of each target; the InputError lists equal problems once."""
        begun, errors = _encode_each(self.begin_target, prefixes)
        problems = dict[str, str]()
        for index, error in errors.items():
            problems.setdefault(str(error), f"{index + 1}: {error}")
        if len(problems) == 1 and len(errors) == len(prefixes):
            raise InputError(*problems, indices=errors)
        raise_all(InputError, "prefixes", list(problems.values()), indices=errors)
        return begun

    def encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], subject: str
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode sources with the ids around them, and targets without special tokens."""
        source_ids, source_errors = _encode_each(self._encode_source, sources)
        target_ids, target_errors = _encode_each(self._encode_target, targets)
        errors = [(index, "source", error) for index, error in source_errors.items()]
        errors += [(index, "target", error) for index, error in target_errors.items()]
        errors.sort(key=lambda one: one[:2])
        problems = [f"pair {index + 1}: " * (len(sources) > 1) + f"{side} {error}" for index, side, error in errors]
        raise_all(InputError, subject, problems, indices=[index for index, _, _ in errors])
        return source_ids, target_ids

    def target_id(self, token: str) -> int:
        """Return the id of a target token, such as a language; raises InputError."""
        found = self._target.id_of(token)
        if found is None:
            raise InputError(f"token {token!r} is not in the target's vocabulary; give one of its tokens, or an id")
        return found

    def pair_ids(self, source: str, target: str) -> tuple[int | None, int | None]:
        """Return the ids of a source and a target token; None for unknown ones."""
        return self._source.id_of(source), self._target.id_of(target)

    def decode(self, ids: Sequence[int]) -> str:
        """Convert target ids to text, without special tokens and unassigned ids."""
        return self._target.decode(ids)

    def decode_with(self, ids: Sequence[int], tokens: Mapping[int, str]) -> str:
        """Convert target ids to text, replacing the tokens at some positions."""
        return self._target.decode_with(ids, tokens)

    def copies(self, text: str) -> list[str | None]:
        """Return the text to copy for each source id; None for ids around the text.

        It is the token if it is known and source and target spell tokens alike, otherwise the part of the text.
        """
        pieces = self._source.pieces(text, spelled=self._source.decodes_like(self._target))
        return [*[None] * len(self.text.source_prefix), *pieces, *[None] * len(self.text.source_suffix)]

    def tokens(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return source and target tokens as the vocabularies spell them."""
        return tuple(map(self._source.token, source_ids)), tuple(map(self._target.token, target_ids))

    def _encode_source(self, text: str) -> list[int]:
        _check_text(text, self._max_characters)
        own = self._source.encode(text, special=True)
        ids = [*self.text.source_prefix, *own, *self.text.source_suffix]
        _check_length(ids, self._spec.max_source_length)
        return ids

    def _encode_target(self, text: str) -> list[int]:
        _check_text(text, self._max_characters)
        ids = self._target.encode(text, special=False)
        _check_length(ids, self._spec.max_target_length - 1 - len(self.text.target_prefix))
        return ids


def _encode_each(
    encode: Callable[[str], list[int]], texts: Sequence[str]
) -> tuple[list[list[int]], dict[int, InputError]]:
    """Encode each text; also return the errors by position."""
    encoded, errors = [], {}
    for index, text in enumerate(texts):
        try:
            encoded.append(encode(text))
        except InputError as error:
            errors[index] = error
    return encoded, errors


def _check_length(ids: Sequence[int], limit: int) -> None:
    if len(ids) > limit:
        raise InputError(f"has {len(ids)} tokens, the limit is {limit}; shorten it")


def _check_sizes(sides: Sequence[tuple[str, Vocabulary, str, int]]) -> None:
    problems = [
        f"{file}: the largest id is {vocabulary.largest_id}, but the model's {name} is {size}"
        for file, vocabulary, name, size in sides
        if vocabulary.largest_id >= size
    ]
    raise_all(BundleError, "tokenizer", problems, remedy="use the tokenizer that the model was trained with")


def _check_around(text: TextConfig, spec: ModelSpec) -> None:
    sizes = {"source_prefix": spec.source_vocab, "source_suffix": spec.source_vocab, "target_prefix": spec.vocab}
    problems = [
        f"{name} has {max(ids)}, expected ids 0 to {size - 1}"
        for name, size in sizes.items()
        if (ids := getattr(text, name)) and max(ids) >= size
    ]
    raise_all(BundleError, "text", problems, remedy="give ids of this model")


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
