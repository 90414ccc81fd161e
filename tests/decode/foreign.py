"""Random models of transformers, each with the same weights as a canonical model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from tests.nn.foreign import canonical
from tfexport.nn.transformer import Transformer


def marian_config(**options: Any) -> MarianConfig:
    sizes = {
        "vocab_size": 48, "decoder_vocab_size": 48, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 64, "init_std": 1.0, "pad_token_id": 47, "eos_token_id": 0,
        "decoder_start_token_id": 47,
    }  # fmt: skip
    return MarianConfig(**(sizes | options))


def marian(
    *, decoder_layers: int = 1, heads: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[MarianMTModel, Transformer]:
    torch.manual_seed(0)
    config = marian_config(decoder_layers=decoder_layers, decoder_attention_heads=heads, **options)
    theirs = MarianMTModel(config).to(dtype).eval()
    return theirs, canonical(theirs)


def t5(
    *, decoder_layers: int = 2, heads: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[T5ForConditionalGeneration, Transformer]:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=decoder_layers, num_heads=heads,
        initializer_factor=1.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip
    theirs = T5ForConditionalGeneration(config).to(dtype).eval()
    return theirs, canonical(theirs, max_length=64)
