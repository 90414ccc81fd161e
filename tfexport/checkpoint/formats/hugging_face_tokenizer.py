"""The tokenizer that lies in a Hugging Face directory beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.checkpoint.formats.hugging_face_weights import T5_FAMILIES
from tfexport.files.names import TOKENIZER

_SENTENCEPIECE = "spiece.model"
# What other tokenizers of transformers are stored in. Most of them number the ids of the model by several files.
_OTHERS = (
    "vocab.json",
    "merges.txt",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    _SENTENCEPIECE,
    "vocab.txt",
)


@dataclass(frozen=True)
class DirectoryTokenizer:
    """What a directory has.

    Attributes:
        path: of a file that an import reads; None where there is none.
        ends_sources: whether transformers puts the end token behind what the file makes of a source.
        note: what the caller should know, where nothing is read.
    """

    path: Path | None = None
    ends_sources: bool = False
    note: str = ""


def directory_tokenizer(directory: Path, config: Mapping[str, Any]) -> DirectoryTokenizer:
    """Find the tokenizer of a directory whose config.json is `config`."""
    if (directory / TOKENIZER).is_file():
        return DirectoryTokenizer(directory / TOKENIZER)
    if (directory / _SENTENCEPIECE).is_file() and config.get("model_type") in T5_FAMILIES:
        return DirectoryTokenizer(directory / _SENTENCEPIECE, ends_sources=True)
    others = [name for name in _OTHERS if (directory / name).is_file()]
    if not others:
        return DirectoryTokenizer()
    return DirectoryTokenizer(
        note=f"no tokenizer is taken from {', '.join(others)}; for texts give --tokenizer, such as the {TOKENIZER} "
        "that AutoTokenizer.from_pretrained(…).save_pretrained(…) writes"
    )
