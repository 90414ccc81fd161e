"""Read the tokens of a tokenizer.json without the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.json.

    Attributes:
        model: kind of its model, such as BPE; None if it has none.
        tokens: by id.
    """

    model: str | None
    tokens: Mapping[int, str]


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the tokens of a tokenizer.json; an invalid file gives an empty vocabulary."""
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        data = None
    model = _object(_object(data).get("model"))
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        pairs = [(number, token) for token, number in vocab.items()]
    else:  # Unigram lists pieces with their scores
        pairs = [(number, piece[0]) for number, piece in enumerate(_list(vocab)) if isinstance(piece, list) and piece]
    pairs += [(one.get("id"), one.get("content")) for one in map(_object, _list(_object(data).get("added_tokens")))]
    kind = model.get("type")
    return Vocabulary(
        kind if isinstance(kind, str) else None,
        {number: token for number, token in pairs if isinstance(number, int) and isinstance(token, str)},
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
