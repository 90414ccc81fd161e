"""Tokenizers as a user gives them, a file or a Hugging Face directory, checked against the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tfexport.checkpoint.formats.coverage import check_coverage
from tfexport.checkpoint.formats.hugging_face_tokenizer import tokenizer_files
from tfexport.checkpoint.formats.language_pair import LanguagePair, with_languages
from tfexport.checkpoint.formats.tokenizer_parts import TokenizerFiles
from tfexport.checkpoint.formats.vocabulary import Side, tokenizer_json
from tfexport.errors import CheckpointError
from tfexport.files.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.models.config import TransformerConfig


def read_tokenizer(path: Path, config: TransformerConfig, side: Side | None = None) -> TokenizerFiles:
    """Read a tokenizer of one side, or of both.

    Args:
        path: a file that `tokenizer_json` reads, or a directory that `tokenizer_files` reads.
        config: of the model.
        side: of the model that it is for; None for both, where a directory may have one for each.

    Raises:
        CheckpointError: it cannot be read or is not of this model.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    if path.is_dir():
        found = tokenizer_files(path, config)
        if found is None:
            raise CheckpointError(f"tokenizer {path}: has no file of a tokenizer; give a directory with tokenizer.json")
    else:
        found = TokenizerFiles({TOKENIZER: tokenizer_json(path, config, side)}, (path.name,))
    return checked(found, path, config, side)


def checked(found: TokenizerFiles, path: Path, config: TransformerConfig, side: Side | None = None) -> TokenizerFiles:
    """Compare what was read with the model's vocabularies, and return what is for `side`; see `read_tokenizer`."""
    if side is not None:
        own = found.files.get(TARGET_TOKENIZER) if side == "target" else None
        found = replace(found, files={TOKENIZER: own or found.files[TOKENIZER]})
    sides: dict[str, Side | None] = {TOKENIZER: side, TARGET_TOKENIZER: "target"}
    if TARGET_TOKENIZER in found.files:
        sides[TOKENIZER] = "source"
    warnings = [check_coverage(raw, path, config, sides[name]) for name, raw in found.files.items()]
    return replace(found, notes=(*found.notes, *filter(None, warnings)))


def read_tokenizers(
    source: Path, target: Path | None, config: TransformerConfig, languages: LanguagePair
) -> TokenizerFiles:
    """Read the tokenizer of both sides, or one for each, for a pair of languages; see `read_tokenizer`."""
    if target is None:
        return with_languages(read_tokenizer(source, config), languages)
    ours, theirs = read_tokenizer(source, config, "source"), read_tokenizer(target, config, "target")
    files = {**ours.files, TARGET_TOKENIZER: theirs.files[TOKENIZER]}
    found = replace(ours, files=files, names=(*ours.names, *theirs.names), notes=(*ours.notes, *theirs.notes))
    return with_languages(found, languages)
