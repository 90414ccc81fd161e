"""Read the tokenizer and the default options of a model directory."""

from __future__ import annotations

import os
from pathlib import Path

from tfexport._io.names import GENERATION, TARGET_TOKENIZER, TEXT, TOKENIZER
from tfexport._io.strict_json import read_json
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, raise_all
from tfexport.generation import GenerationDefaults
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import read_plain, try_tokenizer


def stored_tokenizer(directory: Path, spec: ModelSpec) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """Return the tokenizer of a model directory and its files by name.

    It was tried in a process of its own.
    """
    paths = {name: path for name in (TOKENIZER, TARGET_TOKENIZER) if os.path.lexists(path := directory / name)}
    files = {name: read_plain(path) for name, path in paths.items()}
    if TOKENIZER not in files:
        return None, files
    path = directory / TEXT  # missing in directories of earlier versions
    text = TextConfig.from_dict(read_json(path, TEXT), subject=TEXT) if os.path.lexists(path) else TextConfig()
    for name, raw in files.items():
        try_tokenizer(raw, str(paths[name]))
    return Tokenizer.parse([(str(paths[name]), raw) for name, raw in files.items()], spec, text=text), files


def stored_defaults(directory: Path, spec: ModelSpec) -> GenerationDefaults | None:
    """Return the default options of a model directory, or None if it has none."""
    path = directory / GENERATION
    if not os.path.lexists(path):
        return None
    defaults = GenerationDefaults.from_dict(read_json(path, str(path)), subject=str(path))
    raise_all(ConfigError, str(path), defaults.token_problems(spec.vocab))
    return defaults
