"""What a weight file leaves out and a state dict holds: tied tensors under their other names, computed tables."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor

from tfexport.importing.reference.randomise import is_position_table

# Values that a tensor is looked up by.
_FIRST = 8


def completed(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Give the weights of a file the names of the state dict that a golden was recorded with.

    A golden has random parameters, so that tensors which are equal in it are one
    tensor of the model. `save_pretrained` stores that once.

    Args:
        tensors: of the checkpoint.
        state: of the golden.
        notes: told what was added.

    Returns:
        The tensors, with the prefix that `state` has, tied ones under each name, tables as they are in `state`.
    """
    prefix = _prefix(tensors, state)
    found = {prefix + key: tensor for key, tensor in tensors.items()}
    stored: dict[Hashable, list[str]] = {}
    for name in (name for name in state if name in found):
        stored.setdefault(_look(state[name]), []).append(name)
    tied: dict[str, list[str]] = {}
    tables = []
    for name in (name for name in state if name not in found):
        alike = stored.get(_look(state[name]), [])
        other = next((other for other in alike if torch.equal(state[name], state[other])), None)
        if other is not None:
            tied.setdefault(other, []).append(name)
            found[name] = found[other]
        elif is_position_table(state[name]):
            tables.append(name)
            found[name] = state[name]
    notes += [f"tied to {other} as in the golden, not stored: {', '.join(names)}" for other, names in tied.items()]
    notes += [f"taken from the golden, not stored: {', '.join(tables)}"] if tables else []
    return found


def _prefix(keys: Collection[str], names: Collection[str]) -> str:
    """Return what stands before every key in `names`; empty where that is nothing, or not the same for all."""
    first = next(iter(keys), "")
    for prefix in (name.removesuffix(first) for name in names if name.endswith(first)):
        if prefix and all(prefix + key in names for key in keys):
            return prefix
    return ""


def _look(tensor: Tensor) -> Hashable:
    """Return what equal tensors have in common and others hardly ever, so that few are compared whole."""
    return tuple(tensor.shape), tensor.dtype, tuple(tensor.reshape(-1)[:_FIRST].tolist())
