"""Canonical twins of Hugging Face models and of `torch.nn.Transformer`, in their dtype and with memory of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tfexport.contract import TokenIds
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import apply_layout
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.nn.switches import Value
from tfexport.nn.transformer import Transformer


def canonical(hf_model: Any, **settings: Value) -> Transformer:
    """Import what the model saves, and apply the layout of that to its own tensors."""
    given = tuple(f"{name}={value}" for name, value in settings.items())
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(f"{folder}/hf")
        imported = import_checkpoint(
            f"{folder}/hf", Path(folder) / "model", ImportConfig(settings=given, compare=False)
        )
    tensors = {name: tensor.detach().clone() for name, tensor in hf_model.state_dict().items()}
    return apply_layout(imported.layout, tensors).model()


def canonical_from_torch(
    transformer: nn.Transformer,
    source_embedding: nn.Embedding,
    target_embedding: nn.Embedding,
    generator: nn.Linear,
    positions: Tensor,
    tokens: TokenIds,
) -> Transformer:
    """Copy an `nn.Transformer` in the usual shell: embedding · sqrt(d_model) + `positions` [length, d_model]."""
    parts = {
        "transformer": transformer,
        "src_tok_emb.embedding": source_embedding,
        "tgt_tok_emb.embedding": target_embedding,
        "generator": generator,
    }
    tensors = {
        f"{part}.{name}": tensor.detach().clone()
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    first: Any = transformer.encoder.layers[0]
    settings = {
        "num_heads": transformer.nhead,
        "norm_place": "pre" if first.norm_first else "post",
        "norm_eps": first.norm1.eps,
        "activation": first.activation.__name__,
        **{f"tokens.{name}": getattr(tokens, name) for name in ("pad", "start", "eos")},
    }
    tensors["positional_encoding.pos_embedding"] = positions.clone()
    return apply_layout(builtin_layouts()["torch_nn_transformer"], tensors, settings=settings).model()
