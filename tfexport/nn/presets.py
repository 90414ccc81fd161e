"""Named configurations with seeded random weights: what tests and benchmarks run on.

The sizes of "Attention is all you need", what is written today at such a size, a tiny model, and five notebooks of
from-scratch transformers in their repaired form (`README.md` says what was repaired).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from tfexport.contract import TokenIds
from tfexport.errors import ConfigError
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.positions import sinusoid_table
from tfexport.nn.switches import NormPlace
from tfexport.nn.transformer import Transformer

# Half width of the uniform distribution whose standard deviation is 3.
_LOGIT_SPREAD = 3 * math.sqrt(3)
_TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)


def _stack(
    layers: int, num_heads: int, d_ff: int, place: NormPlace, *, final_norm: bool = False, d_k: int | None = None
) -> StackConfig:
    return StackConfig(
        layers=layers, num_heads=num_heads, d_ff=d_ff, norm_place=place, final_norm=final_norm, d_k=d_k, d_v=d_k
    )


def _paper(d_model: int, d_ff: int, num_heads: int, dropout: float) -> TransformerConfig:
    """Return a row of table 3 (arXiv:1706.03762); §3.2.2 gives projections no bias, §3.4 ties all three tables."""
    stack = _stack(6, num_heads, d_ff, "post")
    return TransformerConfig(
        d_model=d_model,
        source_vocab=32_000,
        target_vocab=32_000,
        max_source_length=512,
        max_target_length=512,
        encoder=stack,
        decoder=stack,
        tokens=_TOKENS,
        embedding_scale=math.sqrt(d_model),
        attention_bias=False,
        output_bias=False,
        tie_embeddings=True,
        tie_output=True,
        dropout=dropout,
    )


def _tiny() -> TransformerConfig:
    stack = _stack(2, 4, 256, "post")
    return TransformerConfig(
        d_model=64,
        source_vocab=1_000,
        target_vocab=1_000,
        max_source_length=128,
        max_target_length=128,
        encoder=stack,
        decoder=stack,
        tokens=_TOKENS,
        embedding_scale=8.0,
    )


def _modern() -> TransformerConfig:
    """Return what is written today, at about the size of paper-base."""
    stack = replace(_stack(6, 8, 1792, "pre", final_norm=True), num_kv_heads=2)
    return replace(
        _paper(512, 2048, 8, 0.1),
        encoder=stack,
        decoder=stack,
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        feed_forward="glu",
        positions="rotary",
        feed_forward_bias=False,
        norm_bias=False,
    )


def _notebook_000() -> TransformerConfig:
    """Post-norm; the norm adds eps outside the division, which folds into its bias and leaves eps 0."""
    stack = _stack(5, 8, 2048, "post")
    return TransformerConfig(
        d_model=512,
        source_vocab=8_000,
        target_vocab=8_000,
        max_source_length=200,
        max_target_length=200,
        encoder=stack,
        decoder=stack,
        tokens=_TOKENS,
        norm="std",
        norm_eps=0.0,
        embedding_scale=math.sqrt(512),
    )


def _notebook_001() -> TransformerConfig:
    stack = _stack(6, 8, 2048, "pre", final_norm=True)
    return TransformerConfig(
        d_model=512,
        source_vocab=16_000,
        target_vocab=24_000,
        max_source_length=350,
        max_target_length=350,
        encoder=stack,
        decoder=stack,
        tokens=TokenIds(unk=0, pad=1, start=2, eos=3),
        norm="std",
        norm_eps=1e-6,
        embedding_scale=math.sqrt(512),
    )


def _notebook_002() -> TransformerConfig:
    """An encoder alone: its output is hidden states."""
    return TransformerConfig(
        d_model=512,
        source_vocab=20_000,
        max_source_length=2048,
        encoder=_stack(6, 8, 2048, "post", d_k=64),
        decoder=None,
        tokens=_TOKENS,
        activation="gelu",
    )


def _notebook_003() -> TransformerConfig:
    stack = _stack(2, 4, 256, "post", final_norm=True, d_k=16)
    return TransformerConfig(
        d_model=64,
        source_vocab=20_000,
        target_vocab=10_000,
        max_source_length=1024,
        max_target_length=1024,
        encoder=stack,
        decoder=stack,
        tokens=_TOKENS,
        activation="gelu",
    )


def _notebook_004() -> TransformerConfig:
    stack = _stack(2, 6, 2048, "post")
    return TransformerConfig(
        d_model=840,
        source_vocab=10_000,
        target_vocab=10_000,
        max_source_length=1024,
        max_target_length=1024,
        encoder=stack,
        decoder=stack,
        tokens=_TOKENS,
        embedding_scale=math.sqrt(840),
    )


_CONFIGS = {
    "paper-base": _paper(512, 2048, 8, 0.1),
    "paper-big": _paper(1024, 4096, 16, 0.3),
    "modern": _modern(),
    "tiny": _tiny(),
    "notebook-000": _notebook_000(),
    "notebook-001": _notebook_001(),
    "notebook-002": _notebook_002(),
    "notebook-003": _notebook_003(),
    "notebook-004": _notebook_004(),
}

PRESETS: tuple[str, ...] = tuple(_CONFIGS)


def preset(name: str) -> TransformerConfig:
    """Return a named configuration.

    Raises:
        ConfigError: the name is unknown; lists all names.
    """
    if name not in _CONFIGS:
        raise ConfigError(f"preset {name!r} is unknown, expected one of {', '.join(PRESETS)}")
    return _CONFIGS[name]


def build_preset(name: str, seed: int = 0) -> Transformer:
    """Build a named model with random weights, the same bytes on every call and machine.

    Embeddings have variance 1 after scaling, logits a standard deviation of
    about 3, and gains and biases differ from 1 and 0, so that leaving one out
    changes the result. Greedy decoding depends on the source and seldom repeats
    itself.

    Args:
        name: one of `PRESETS`.
        seed: 0 or more; another seed gives other weights.

    Returns:
        The model in eval mode, float32; torch's own random state is not touched.

    Raises:
        ConfigError: the name is unknown; lists all names.
    """
    config = preset(name)
    model = Transformer.unfilled(config)
    # Raw bits, because numpy promises their stream for all time, unlike that of its distributions.
    bits = np.random.PCG64(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".pos"):
                parameter.copy_(sinusoid_table(*parameter.shape))
            else:
                centre, spread = _distribution(parameter_name, tuple(parameter.shape), config)
                parameter.copy_(_uniform(bits, parameter.shape).mul_(spread).add_(centre))
    return model.eval()


def _distribution(name: str, shape: tuple[int, ...], config: TransformerConfig) -> tuple[float, float]:
    """Return centre and half width of the uniform distribution of one parameter.

    Plain Glorot weights make decoding repeat one token for ever: attention and
    ReLU add the same vector to every position, and a tied output finds the
    input token again. Hence quiet attention, sparse and loud feed-forward, and
    behind it, where the output is tied, gains of either sign.
    """
    if name.endswith("fc1.bias"):
        return -1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.1
    if len(shape) == 1:
        return (0.0, _LOGIT_SPREAD) if config.tie_output and name == _last_norm(config) else (1.0, 0.2)
    if name.endswith("embed.weight"):
        return 0.0, math.sqrt(3) / config.embedding_scale
    if name == "out.weight":
        return 0.0, _LOGIT_SPREAD / math.sqrt(config.d_model)
    gain = 0.3 if name.endswith("o.weight") else 4.0 if name.endswith("fc2.weight") else 1.0
    return 0.0, gain * math.sqrt(6 / sum(shape))


def _last_norm(config: TransformerConfig) -> str:
    stack = config.decoder
    assert stack is not None
    return "dec.norm.weight" if stack.final_norm else f"dec.layers.{stack.layers - 1}.norm3.weight"


def _uniform(bits: np.random.PCG64, shape: torch.Size) -> torch.Tensor:
    """Draw float32 `shape` from [-1, 1) in steps of 2**-23, exact on every machine."""
    count = shape.numel()
    raw = bits.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    return torch.from_numpy((raw >> np.uint32(8)).astype(np.float32)).mul_(2.0**-23).sub_(1.0).reshape(shape)
