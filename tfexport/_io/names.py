"""File names that several stages use, and the check of callers' paths."""

from __future__ import annotations

import os
from pathlib import Path

from tfexport.errors import ConfigError, shortened

# Model directories.
CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"  # also in bundles, as the next two
GENERATION = "generation.json"
TARGET_TOKENIZER = "target_tokenizer.json"
TEXT = "text.json"
PROCESSOR = "processor.json"  # also in bundles
SHORTLIST_TABLE = "shortlist.bin"  # only in bundles
CERTIFICATE = "certificate.json"  # of an import, as the next one
LAYOUT = "layout.yaml"
# Bundles; the names of the weight files are in `tfexport.contract`.
MANIFEST = "manifest.json"
CARD = "README.md"  # also of Hugging Face directories
# Engines of a bundle; `kernels` has a folder per GPU, whose files are named after the plans.
ENGINE_MANIFEST = "engine.json"
BUILD_LOG = "build.log"
ENGINE_LAYERS = "layers.json"
KERNELS = "kernels"
KERNELS_INDEX = "kernels.json"
KERNELS_SUFFIX = ".kernels"
PROFILE_START = "start"  # next to a profile: nanoseconds since 1970 when it began
SIGNATURE = "manifest.json.sig"
ENGINE_SIGNATURE = "engine.json.sig"


def checked_path(value: object, name: str) -> Path:
    """Return a caller's path; raise ConfigError unless it is valid UTF-8 without null."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{name} is {shortened(value)}, expected a path as text")
    try:
        text.encode()  # ONNX Runtime needs UTF-8
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {shortened(text)}, which is not valid UTF-8; rename the folder") from error
    if "\0" in text:
        raise ConfigError(f"{name} is {shortened(text)}, and no path has a null character; check the path")
    return Path(text)
