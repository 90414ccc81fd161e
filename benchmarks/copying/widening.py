"""A small trained model as one of another size that says the same, so that a step costs what it costs at that size.

Every tensor of the residual stream is there several times, side by side, so that norms are what they were; heads and
inner layers are filled up with zeros, further layers add nothing, and further tokens are never said.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tfexport.models.config import StackConfig, TransformerConfig
from tfexport.models.transformer import Transformer

D_MODEL, LAYERS, HEADS, D_FF, VOCAB, MAX_LENGTH = 512, 6, 8, 2048, 32_000, 512
_NEVER = -1e4


def widened(small: Transformer) -> Transformer:
    """Return a model of the sizes of paper-base, pre-norm, that says what `small` says."""
    copies, config = D_MODEL // small.config.d_model, small.config
    assert config.decoder is not None
    stack = dataclasses.replace(config.encoder, layers=LAYERS, num_heads=HEADS, d_ff=D_FF)
    large = Transformer(
        dataclasses.replace(
            config,
            d_model=D_MODEL,
            source_vocab=VOCAB,
            target_vocab=VOCAB,
            max_source_length=MAX_LENGTH,
            max_target_length=MAX_LENGTH,
            encoder=stack,
            decoder=dataclasses.replace(config.decoder, layers=LAYERS, num_heads=HEADS, d_ff=D_FF),
            attention_scale=config.d_k("encoder") ** -0.5,
            logit_scale=config.logit_scale / copies,
            output_bias=True,
        )
    )
    known = small.state_dict()
    state = {}
    for name, tensor in large.state_dict().items():
        side, layer = name.partition(".")[0], _layer(name)
        of = name.replace(f"layers.{layer}.", "layers.0.") if layer >= _layers(config, side) else name
        adds = of == name or not any(part in name for part in (".o.", ".fc2."))
        state[name] = _fill(name, known.get(of), tensor, config, copies) if adds else torch.zeros_like(tensor)
    large.load_state_dict(state)
    return large.eval()


def _layer(name: str) -> int:
    return int(name.split("layers.")[1].partition(".")[0]) if "layers." in name else -1


def _layers(config: TransformerConfig, side: str) -> int:
    stack: StackConfig | None = config.encoder if side == "enc" else config.decoder
    return stack.layers if stack else 0


def _fill(name: str, small: Tensor | None, large: Tensor, config: TransformerConfig, copies: int) -> Tensor:
    """Return a tensor of the large model."""
    if name == "out.bias":
        filled = torch.full_like(large, _NEVER)
        filled[: config.target_vocab] = 0 if small is None else small * copies
        return filled
    assert small is not None
    if any(part in name for part in (".q.", ".k.", ".v.")):
        return _heads(_repeated(small, copies, -1) / copies if small.ndim == 2 else small, large.shape, config, 0)
    if ".o." in name:
        tiled = small.repeat(copies, 1) if small.ndim == 2 else small.repeat(copies)
        return _heads(tiled, large.shape, config, 1) if small.ndim == 2 else tiled
    if ".fc1." in name:
        return _padded(_repeated(small, copies, -1) / copies if small.ndim == 2 else small, large.shape)
    if ".fc2." in name:
        return _padded(small.repeat(copies, 1) if small.ndim == 2 else small.repeat(copies), large.shape)
    return _padded(_repeated(small, copies, -1), large.shape)  # embeddings, positions and norms


def _repeated(small: Tensor, copies: int, axis: int) -> Tensor:
    return torch.cat([small] * copies, axis)


def _heads(small: Tensor, shape: torch.Size, config: TransformerConfig, axis: int) -> Tensor:
    """Give each head its width in the large model, and zeros for heads that there are not."""
    wide, width = D_MODEL // HEADS, config.d_k("encoder")
    filled = torch.zeros(shape)
    for head in range(config.num_heads("encoder")):
        filled.narrow(axis, head * wide, width).copy_(small.narrow(axis, head * width, width))
    return filled


def _padded(small: Tensor, shape: torch.Size) -> Tensor:
    filled = torch.zeros(shape)
    filled[tuple(slice(size) for size in small.shape)] = small
    return filled
