"""Folders that hold one checkpoint: of Hugging Face, of accelerate, of Lightning."""

from __future__ import annotations

from pathlib import Path

from tfexport._io.names import CONFIG, MODEL_WEIGHTS
from tfexport.errors import CheckpointError

INDEX = ".index.json"
# As transformers and accelerate call them, the likelier first.
_WEIGHTS = (MODEL_WEIGHTS, f"{MODEL_WEIGHTS}{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")
# Where Lightning puts its checkpoints, within the folder of a version.
_PLACES = (".", "checkpoints")


def weights_in(folder: Path) -> Path:
    """Return the file of weights in a folder, or the index of its shards.

    Raises:
        CheckpointError: there is none, or more than one; or shards of another kind, with the command that joins them.
        OSError: the folder cannot be read.
    """
    if known := next((folder / name for name in _WEIGHTS if (folder / name).exists()), None):
        return known
    found = [file for place in _PLACES if (folder / place).is_dir() for file in _checkpoints(folder / place)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8])
        raise CheckpointError(f"{folder}: holds {len(found)} checkpoints, {names}; give one of them")
    if (folder / "zero_to_fp32.py").exists():
        remedy = f"it was sharded by DeepSpeed: join it with python {folder / 'zero_to_fp32.py'} {folder} JOINED"
    elif shards := next(folder.rglob("*.distcp"), None):
        remedy = f"it was sharded by FSDP: join it with accelerate merge-weights {shards.parent} JOINED"
    else:
        remedy = "give a state dict file or a Hugging Face directory"
    raise CheckpointError(
        f"{folder}: is a directory without {CONFIG} and weights ({', '.join(_WEIGHTS)}) or one checkpoint; {remedy}"
    )


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
