"""What the tokenizers of Hugging Face directories are read into, and what several of them are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner

from tfexport._io.strict_json import parse_json, read_json
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.formats.vocabulary import read_vocabulary

Ids = tuple[int, ...]
# Twice as many as any vocabulary has; a token is made for each id that is left out.
MAX_ID = 2**21


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizers, and what transformers puts around what they make of a source.

    Attributes:
        files: one tokenizer.json a side, by name.
        names: of the files that they were made from.
        source_prefix: ids before a source.
        source_suffix: ids behind it.
        generation: options of generation that go with a target language.
        notes: what the caller should know.
    """

    files: Mapping[str, bytes]
    names: tuple[str, ...]
    source_prefix: Ids = ()
    source_suffix: Ids = ()
    generation: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def as_json(inner: Inner) -> bytes:
    """Spell a tokenizer as tokenizer.json."""
    return inner.to_str(pretty=True).encode()


def read_ids(path: Path) -> dict[str, int]:
    """Read a vocab.json: the id of each token.

    Raises:
        CheckpointError: it is damaged, or has no unknown token.
    """
    try:
        ids = parse_json(read_vocabulary(path))
    except ValueError as error:
        raise CheckpointError(f"tokenizer {path}: is no JSON ({error})") from error
    whole = isinstance(ids, dict) and all(type(i) is int and i >= 0 for i in ids.values())
    if not whole or len(set(ids.values())) < len(ids) or not ids:
        raise CheckpointError(f"tokenizer {path}: expected tokens with an id of its own each")
    if max(ids.values()) > MAX_ID:
        raise CheckpointError(f"tokenizer {path}: has id {max(ids.values())}, expected at most {MAX_ID}")
    if "<unk>" not in ids:
        raise CheckpointError(f"tokenizer {path}: has no token <unk>")
    return dict(ids)


def family_of(directory: Path) -> str:
    """Return the family that a directory's config.json names, or that of its tokenizer; empty where neither does."""
    if name := read_settings(directory, "config.json").get("model_type"):
        return str(name)
    return tokenizer_class(directory).removesuffix("50")


def tokenizer_class(directory: Path) -> str:
    """Return which tokenizer of transformers a directory names, in lower case; empty where it names none."""
    own = read_settings(directory).get("tokenizer_class")
    name = str(own or read_settings(directory, "config.json").get("tokenizer_class") or "")
    return name.removesuffix("Fast").removesuffix("Tokenizer").lower()


def read_settings(directory: Path, name: str = "tokenizer_config.json") -> Mapping[str, Any]:
    """Read a JSON of a directory; empty where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not (directory / name).is_file():
        return {}
    try:
        found = read_json(directory / name, name)
    except ConfigError as error:
        raise CheckpointError(f"tokenizer {directory}: {error}") from error
    return found if isinstance(found, dict) else {}
