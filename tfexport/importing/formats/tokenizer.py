"""Tokenizers as a user gives them, a file or a Hugging Face directory, checked against the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tfexport._io.names import TARGET_TOKENIZER, TOKENIZER
from tfexport._io.process import limits_memory
from tfexport.contract import ModelSpec
from tfexport.errors import BundleError, CheckpointError
from tfexport.importing.formats.coverage import check_coverage
from tfexport.importing.formats.hugging_face_tokenizer import tokenizer_files
from tfexport.importing.formats.language_pair import LanguagePair, with_languages
from tfexport.importing.formats.tokenizer_parts import TokenizerFiles
from tfexport.importing.formats.vocabulary import Side, tokenizer_json
from tfexport.text.vocabulary import try_tokenizer


def read_tokenizer(path: Path, spec: ModelSpec, side: Side | None = None) -> TokenizerFiles:
    """Read a tokenizer of one side, or of both.

    Args:
        path: a file that `tokenizer_json` reads, or a directory that `tokenizer_files` reads.
        spec: of the model.
        side: of the model that it is for; None for both, where a directory may have one for each.

    Raises:
        CheckpointError: it cannot be read or is not of this model.
        BackendError: a SentencePiece model, and the package `sentencepiece` is not installed.
    """
    if path.is_dir():
        found = tokenizer_files(path, spec)
        if found is None:
            raise CheckpointError(f"tokenizer {path}: has no file of a tokenizer; give a directory with tokenizer.json")
    else:
        found = TokenizerFiles({TOKENIZER: tokenizer_json(path, spec, side)}, (path.name,))
    return checked(found, path, spec, side)


def checked(found: TokenizerFiles, path: Path, spec: ModelSpec, side: Side | None = None) -> TokenizerFiles:
    """Try what was read, compare it with the model, and return what is for `side`; see `read_tokenizer`."""
    if side is not None:
        own = found.files.get(TARGET_TOKENIZER) if side == "target" else None
        found = replace(found, files={TOKENIZER: own or found.files[TOKENIZER]})
    for raw in found.files.values():
        try:
            try_tokenizer(raw, f"tokenizer {path}:")
        except BundleError as error:
            raise CheckpointError(str(error)) from error
    sides: dict[str, Side | None] = {TOKENIZER: side, TARGET_TOKENIZER: "target"}
    if TARGET_TOKENIZER in found.files:
        sides[TOKENIZER] = "source"
    warnings = [check_coverage(raw, path, spec, sides[name]) for name, raw in found.files.items()]
    unlimited = (
        "" if limits_memory() else "the tokenizer was tried without a limit of memory, which this system has not"
    )
    return replace(found, notes=(*found.notes, *filter(None, (*warnings, unlimited))))


def read_tokenizers(source: Path, target: Path | None, spec: ModelSpec, languages: LanguagePair) -> TokenizerFiles:
    """Read the tokenizer of both sides, or one for each, for a pair of languages; see `read_tokenizer`."""
    if target is None:
        return with_languages(read_tokenizer(source, spec), languages)
    ours, theirs = read_tokenizer(source, spec, "source"), read_tokenizer(target, spec, "target")
    files = {**ours.files, TARGET_TOKENIZER: theirs.files[TOKENIZER]}
    found = replace(ours, files=files, names=(*ours.names, *theirs.names), notes=(*ours.notes, *theirs.notes))
    return with_languages(found, languages)
