"""Small canonical models and batches, seeded, with random parameters, and models of words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from tfexport.contract import TokenIds
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.transformer import Transformer
from tfexport.runtime.sources import Sources
from tfexport.sources import TokenSource

VOCAB = 31


def word_tokenizer(words: Sequence[str], eos: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer of words, which begin with pad, start, eos and unk."""
    made = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[3]))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens(list(words[:4]))
    if eos:
        made.post_processor = TemplateProcessing(single=f"$A {words[2]}", special_tokens=[(words[2], 2)])
    return made


class Batch(NamedTuple):
    """Uneven rows, padded on the right; the source is longer than the target."""

    source_ids: Tensor
    source_mask: Tensor
    target_ids: Tensor


def batch(*, vocab: int = VOCAB, source_len: int = 9, target_len: int = 7, seed: int = 0) -> Batch:
    """Three rows of which the first is full; ids are never 0, 1 or the last, which may be padding."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(2, vocab - 1, (3, source_len), generator=generator)
    target = torch.randint(2, vocab - 1, (3, target_len), generator=generator)
    mask = torch.arange(source_len)[None] < torch.tensor([source_len, source_len // 2, 1])[:, None]
    return Batch(source, mask, target)


def sources(ids: NDArray[Any], mask: NDArray[Any]) -> Sources:
    """Return token ids and their mask, [batch, source_len], as a session takes them."""
    return Sources(TokenSource(VOCAB, 0), {"source_ids": ids, "source_mask": mask})


def config(
    *, encoder: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None, **changes: Any
) -> TransformerConfig:
    stack = StackConfig(layers=2, num_heads=4, d_ff=48, norm_place="post", final_norm=False)
    base = TransformerConfig(
        d_model=32,
        source_vocab=VOCAB,
        target_vocab=VOCAB,
        max_source_length=24,
        max_target_length=24,
        encoder=replace(stack, **(encoder or {})),
        decoder=replace(stack, **(decoder or {})),
        tokens=TokenIds(pad=0, start=1, eos=2),
        dropout=0.0,
    )
    return replace(base, **changes)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Fill trainable parameters and bias buffers; equal names get equal values."""
    bias_buffers = [(name, buffer) for name, buffer in module.named_buffers() if name.endswith("bias")]
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for name, tensor in trainable + bias_buffers:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            gain = name.endswith("weight") and tensor.dim() == 1
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64) + gain)


def model(config: TransformerConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    built = Transformer(config)
    randomise(built, seed)
    return built.to(dtype).eval()


_T5 = config(
    encoder={"norm_place": "pre", "final_norm": True, "d_k": 6, "d_v": 10},
    decoder={"norm_place": "pre", "final_norm": True, "d_k": 6, "d_v": 10},
    norm="rms",
    norm_bias=False,
    feed_forward="glu",
    activation="gelu_tanh",
    relative_bias="t5",
    relative_buckets=8,
    relative_max_distance=16,
    positions="none",
    attention_scale=1.0,
    attention_softcap=2.0,
    logit_scale=0.2,
    attention_bias=False,
    feed_forward_bias=False,
    output_bias=False,
    tie_embeddings=True,
    tie_output=True,
)
VARIANTS = {
    "post": config(),
    "pre-std": config(
        encoder={"norm_place": "pre", "final_norm": True},
        decoder={"norm_place": "pre", "final_norm": True},
        norm="std",
        norm_eps=1e-6,
        embedding_scale=5.0,
    ),
    "t5": _T5,
    "umt5": replace(
        _T5,
        encoder=replace(_T5.encoder, d_k=8, d_v=8),
        decoder=replace(_T5.encoder, d_k=8, d_v=8),
        relative_bias="t5_per_layer",
        attention_softcap=0.0,
        tie_output=False,
    ),
    "mixed": config(
        encoder={"norm_place": "pre", "num_heads": 2, "layers": 1, "d_ff": 40, "residual_scale": 0.8},
        decoder={"layers": 3, "residual_scale": 1.2},
        embedding_norm=True,
        activation="relu2",
        relative_bias="alibi",
        qk_norm="all",
    ),
    "modern": config(
        encoder={"norm_place": "sandwich", "final_norm": True, "num_kv_heads": 2},
        decoder={"norm_place": "pre", "final_norm": True, "num_kv_heads": 1, "parallel": "cross"},
        norm="rms",
        norm_bias=False,
        qk_norm="head",
        activation="silu",
        feed_forward="glu",
        positions="rotary",
        rotary_base=500.0,
        rotary_dim=4,
        rotary_pairs="interleaved",
        rotary_scaling="llama3",
        rotary_original_length=16,
        rotary_cross=True,
        logit_softcap=4.0,
        attention_bias=False,
        feed_forward_bias=False,
        output_bias=False,
        tie_embeddings=True,
        tie_output=True,
    ),
}
VARIANTS["ssru"] = config(decoder={"mixer": "ssru"})
VARIANTS["average"] = config(decoder={"mixer": "average"})
ENCODER_ALONE = replace(VARIANTS["post"], decoder=None, target_vocab=None, max_target_length=None)
# For tests that export them all; those that differ little from others are slow tests.
VARIANT_NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("pre-std", "umt5", "average") else name for name in VARIANTS
]
