"""The weights of a Hugging Face directory as transformers loads them: names of the whole model, nothing unused."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from tfexport.errors import CheckpointError

# What stands in published files and no model of today has.
_UNUSED = (
    "model.*coder.version",
    "model.*coder.embed_positions.weights",
    "decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",
)
_BASE = "model."
_HEAD, _BIAS = "lm_head.weight", "final_logits_bias"
_T5GEMMA_HEAD = "lm_head.out_proj.weight"
_LISTED = 8
T5_FAMILIES = ("t5", "mt5", "umt5")


def as_loaded(config: Mapping[str, Any], tensors: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Return the weights that a model has after loading a file.

    Args:
        config: config.json, of a family with a layout.
        tensors: of the file.
        notes: told what was left out or named anew.

    Raises:
        CheckpointError: the output projection is missing and not tied.
    """
    kind = config.get("model_type")
    base, head = "" if kind in T5_FAMILIES else _BASE, _T5GEMMA_HEAD if kind == "t5gemma" else _HEAD
    if not any(key.startswith(base) for key in tensors):
        notes.append(f"has the names of the model without its head; put {base!r} before them")
        tensors = {key if key in (head, _BIAS) else base + key: tensor for key, tensor in tensors.items()}
    found = dict(tensors)
    unused = [key for key in found if any(fnmatchcase(key, pattern) for pattern in _UNUSED)]
    shared = f"{base}shared.weight"
    tables = [f"{base}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if head not in found:
        _check_tied(config, head, is_t5=not base)
    if shared in found and all(table in found for table in tables):
        # Each side has a table of its own, mostly the same.
        if head not in found and config.get("share_encoder_decoder_embeddings", True):
            found[head] = found[shared]
        elif not all(torch.equal(found[shared], found[table]) for table in tables):
            unused.append(shared)
        del found[shared]
    if unused:
        more = f" and {len(unused) - _LISTED} more" if len(unused) > _LISTED else ""
        notes.append(f"left out what transformers does not load: {', '.join(sorted(unused)[:_LISTED])}{more}")
    return {key: tensor for key, tensor in found.items() if key not in unused}


def _check_tied(config: Mapping[str, Any], head: str, *, is_t5: bool) -> None:
    if not is_t5 and config.get("tie_word_embeddings", True) is False:
        raise CheckpointError(
            f"the weights have no {head}, and config.json says tie_word_embeddings false; save the whole model"
        )
