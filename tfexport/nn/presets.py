"""Named configurations with seeded random weights, for tests and benchmarks.

The notebooks are five public from-scratch transformers, with their bugs fixed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tfexport.contract import TokenIds
from tfexport.errors import ConfigError
from tfexport.nn.config import (
    ConvolutionActivation,
    ConvolutionConfig,
    FeaturesConfig,
    ImageConfig,
    StackConfig,
    TransformerConfig,
)
from tfexport.nn.positions import sinusoid_table
from tfexport.nn.switches import NormPlace
from tfexport.nn.transformer import Transformer

# Half width of the uniform distribution whose standard deviation is 3.
_LOGIT_SPREAD = 3 * math.sqrt(3)
_TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)


def _stack(layers: int, num_heads: int, d_ff: int, norm_place: NormPlace, **more: Any) -> StackConfig:
    return StackConfig(
        layers=layers, num_heads=num_heads, d_ff=d_ff, norm_place=norm_place, **{"final_norm": False, **more}
    )


def _both(stack: StackConfig, d_model: int, vocab: int, max_length: int, **switches: Any) -> TransformerConfig:
    both: dict[str, Any] = {
        "source_vocab": vocab,
        "max_source_length": max_length,
        "encoder": stack,
        "target_vocab": vocab,
        "tokens": _TOKENS,
        **switches,
    }
    return TransformerConfig(d_model=d_model, max_target_length=max_length, decoder=stack, **both)


def _convolution(channels: int, kernel: int, stride: int, activation: ConvolutionActivation) -> ConvolutionConfig:
    return ConvolutionConfig(
        channels=channels, kernel=kernel, stride=stride, padding=kernel // 2, activation=activation
    )


def _paper(d_model: int, d_ff: int, num_heads: int, dropout: float) -> TransformerConfig:
    # Table 3 of arXiv:1706.03762; §3.2.2 has projections without bias, and §3.4 ties all three tables.
    return _both(
        _stack(6, num_heads, d_ff, "post"),
        d_model,
        vocab=32_000,
        max_length=512,
        embedding_scale=math.sqrt(d_model),
        attention_bias=False,
        output_bias=False,
        tie_embeddings=True,
        tie_output=True,
        dropout=dropout,
    )


def _modern() -> TransformerConfig:
    stack = _stack(6, 8, 1792, "pre", final_norm=True, num_kv_heads=2)
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


def _student(layers: int, d_model: int, d_ff: int, **decoder: Any) -> TransformerConfig:
    # Small translation models, distilled from larger ones, with a deep encoder and a shallow decoder.
    encoder = _stack(6, 8, d_ff, "post")
    return replace(
        _both(encoder, d_model, vocab=32_000, max_length=512, embedding_scale=math.sqrt(d_model)),
        decoder=replace(encoder, layers=layers, **decoder),
        tie_embeddings=True,
        tie_output=True,
    )


_CONFIGS = {
    "paper-base": _paper(512, 2048, 8, 0.1),
    "paper-big": _paper(1024, 4096, 16, 0.3),
    "modern": _modern(),
    "student-base": _student(2, 512, 2048),
    "student-memory": _student(4, 384, 1536),
    "student-tiny": _student(2, 256, 1536),
    "student-tiny-ssru": _student(2, 256, 1536, mixer="ssru"),
    "tiny": _both(_stack(2, 4, 256, "post"), 64, 1_000, 128, embedding_scale=8.0),
    # Its norm adds eps after the division, which is equal to a change of the bias, so norm_eps is 0.
    "notebook-000": _both(
        _stack(5, 8, 2048, "post"), 512, 8_000, 200, norm="std", norm_eps=0.0, embedding_scale=math.sqrt(512)
    ),
    "notebook-001": _both(
        _stack(6, 8, 2048, "pre", final_norm=True),
        512,
        16_000,
        350,
        target_vocab=24_000,
        tokens=TokenIds(unk=0, pad=1, start=2, eos=3),
        norm="std",
        norm_eps=1e-6,
        embedding_scale=math.sqrt(512),
    ),
    # Encoder-only: its output is hidden states.
    "notebook-002": TransformerConfig(
        d_model=512,
        source_vocab=20_000,
        max_source_length=2048,
        encoder=_stack(6, 8, 2048, "post", d_k=64, d_v=64),
        decoder=None,
        tokens=_TOKENS,
        activation="gelu",
    ),
    "notebook-003": _both(
        _stack(2, 4, 256, "post", final_norm=True, d_k=16, d_v=16),
        64,
        20_000,
        1024,
        target_vocab=10_000,
        activation="gelu",
    ),
    "notebook-004": _both(_stack(2, 6, 2048, "post"), 840, 10_000, 1024, embedding_scale=math.sqrt(840)),
    # Log-mel spectra of one length, as in Whisper.
    "speech-whisper": _both(
        _stack(2, 4, 256, "pre", final_norm=True),
        64,
        1_000,
        128,
        source_vocab=0,
        features=FeaturesConfig(
            dim=80,
            convolutions=(_convolution(64, 3, 1, "gelu"), _convolution(64, 3, 2, "gelu")),
            projection=False,
            frames=64,
        ),
        max_source_length=32,
        activation="gelu",
        output_bias=False,
    ),
    # Filter banks of any length, as in Speech2Text.
    "speech-s2t": _both(
        _stack(2, 4, 256, "pre", final_norm=True),
        64,
        1_000,
        128,
        source_vocab=0,
        features=FeaturesConfig(
            dim=80, convolutions=(_convolution(64, 5, 2, "glu"), _convolution(64, 5, 2, "glu")), projection=False
        ),
        embedding_scale=8.0,
        output_bias=False,
        tie_output=True,
    ),
    # Images, with an encoder as in ViT and a narrower decoder as in TrOCR.
    "captioner": _both(
        _stack(2, 4, 256, "post", embedding_norm=True, embedding_scale=8.0, norm_eps=1e-5),
        64,
        1_000,
        128,
        source_vocab=0,
        max_source_length=17,
        image=ImageConfig(channels=3, height=32, width=32, patch_height=8, patch_width=8, class_tokens=1),
        encoder=_stack(2, 4, 256, "pre", final_norm=True, d_model=96),
        activation="gelu",
        norm_eps=1e-12,
    ),
}

PRESETS: tuple[str, ...] = tuple(_CONFIGS)


def preset(name: str) -> TransformerConfig:
    """Return a named configuration."""
    if name not in _CONFIGS:
        raise ConfigError(f"preset {name!r} is unknown, expected one of {', '.join(PRESETS)}")
    return _CONFIGS[name]


def build_preset(name: str, seed: int = 0) -> Transformer:
    """Build a named model with random weights that are equal on every machine.

    Logits have a standard deviation of about 3, and gains and biases differ from 1 and 0, so that omitting one changes
    the result. Greedy outputs depend on the source and rarely repeat themselves.
    """
    config = preset(name)
    model = Transformer.unfilled(config)
    # Raw bits, because numpy guarantees a stable stream for them, but not for its distributions.
    bits = np.random.PCG64(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".pos"):
                parameter.copy_(sinusoid_table(*parameter.shape))
            else:
                center, spread = _distribution(parameter_name, tuple(parameter.shape), config)
                parameter.copy_(_uniform(bits, parameter.shape).mul_(spread).add_(center))
    return model.eval()


def _distribution(name: str, shape: tuple[int, ...], config: TransformerConfig) -> tuple[float, float]:
    # With plain Glorot weights, decoding repeats one token: attention and ReLU add one vector to all positions, and a
    # tied output returns its input. So attention is small, the feed-forward network is sparse and large, and if the
    # output is tied, the last norm's gains have either sign. Returns center and half width.
    if name.endswith("bias"):
        return (-1.0 if name.endswith("fc1.bias") else 0.0), 0.1
    if len(shape) == 1:
        return (0.0, _LOGIT_SPREAD) if config.tie_output and name == _last_norm(config) else (1.0, 0.2)
    if name.endswith("embed.weight"):
        return 0.0, math.sqrt(3) / config.value("encoder" if name.startswith("enc.") else "decoder", "embedding_scale")
    if name == "out.weight":
        return 0.0, _LOGIT_SPREAD / math.sqrt(config.d_model)
    if name.startswith("enc.front."):
        return 0.0, math.sqrt(3 / (1 if name.endswith("tokens") else math.prod(shape[1:])))
    gain = 0.3 if name.endswith("o.weight") else 4.0 if name.endswith("fc2.weight") else 1.0
    return 0.0, gain * math.sqrt(6 / sum(shape))


def _last_norm(config: TransformerConfig) -> str:
    stack = config.stack("decoder")
    return "dec.norm.weight" if stack.final_norm else f"dec.layers.{stack.layers - 1}.norm3.weight"


def _uniform(bits: np.random.PCG64, shape: torch.Size) -> torch.Tensor:
    """Draw float32 `shape` from [-1, 1) in steps of 2**-23, exact on every machine."""
    count = shape.numel()
    raw = bits.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    return torch.from_numpy((raw >> np.uint32(8)).astype(np.float32)).mul_(2.0**-23).sub_(1.0).reshape(shape)
