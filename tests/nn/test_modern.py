"""Parts of recent models equal those of transformers and of PyTorch's own functions, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BloomConfig,
    Gemma2Config,
    GlmConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding
from transformers.models.glm.modeling_glm import GlmAttention, GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.models.t5gemma import modeling_t5gemma

from tests import tiny
from tests.nn.foreign import canonical
from tfexport.nn.attention import MultiHeadAttention
from tfexport.nn.cache import ConcatCache, KeyValue
from tfexport.nn.config import TransformerConfig
from tfexport.nn.positions import Alibi, Rotary
from tfexport.nn.transformer import Transformer

TOLERANCE = 1e-12
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "vocab_size": 31, "num_hidden_layers": 1, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
GROUPED = {"num_kv_heads": 2}
FOREIGN: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SIZES), LlamaAttention, LlamaRotaryEmbedding, {}),
    "llama, another base": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        LlamaAttention, LlamaRotaryEmbedding, {"rotary_base": 500.0},
    ),
    "llama 3.1": (
        LlamaConfig(**SIZES, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }),
        LlamaAttention, LlamaRotaryEmbedding, {"rotary_scaling": "llama3", "rotary_original_length": 64},
    ),
    "llama, scaled linearly": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
        LlamaAttention, LlamaRotaryEmbedding, {"rotary_scaling": "linear", "rotary_factor": 3.0},
    ),
    "glm: half of each head, interleaved": (
        GlmConfig(**SIZES), GlmAttention, GlmRotaryEmbedding, {"rotary_dim": 4, "rotary_pairs": "interleaved"},
    ),
    "qwen3: a norm of each head": (Qwen3Config(**SIZES), Qwen3Attention, Qwen3RotaryEmbedding, {"qk_norm": "head"}),
    "olmo2: a norm of all heads": (
        Olmo2Config(**SIZES, rms_norm_eps=1e-6), Olmo2Attention, Olmo2RotaryEmbedding, {"qk_norm": "all"},
    ),
    "gemma2: scores level off": (
        Gemma2Config(**SIZES, query_pre_attn_scalar=8, attn_logit_softcapping=3.0, sliding_window=99),
        Gemma2Attention, Gemma2RotaryEmbedding, {"attention_softcap": 3.0},
    ),
}  # fmt: skip


def in_float64(self: Any, x: Tensor) -> Tensor:
    """Compute the RMS norms of transformers without their conversion to float32."""
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    gain = 1.0 + self.weight if isinstance(self, modeling_t5gemma.T5GemmaRMSNorm) else self.weight
    return gain * F.rms_norm(x, x.shape[-1:], eps=eps)


@pytest.fixture(autouse=True)
def wide_norms_and_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in (modeling_olmo2.Olmo2RMSNorm, modeling_qwen3.Qwen3RMSNorm, modeling_t5gemma.T5GemmaRMSNorm):
        monkeypatch.setattr(norm, "forward", in_float64)
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))


def wide_angles(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute angles in float64 from the frequencies of the original."""
    angles = positions.double()[..., None] * rotary.inv_freq.double()
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def attention(config: TransformerConfig) -> MultiHeadAttention:
    made = Transformer(config).double().dec.blocks[0].self
    tiny.randomise(made)
    return made.eval()


def empty(config: TransformerConfig, rows: int) -> list[KeyValue]:
    past = torch.zeros(rows, config.num_kv_heads("decoder"), 0, config.d_k("decoder"), dtype=torch.float64)
    return [KeyValue(past, past)]


@pytest.mark.parametrize("name", FOREIGN)
def test_attention_equals_that_of_transformers(name: str) -> None:
    foreign, attention_class, rotary_class, changes = FOREIGN[name]
    ours = attention(
        tiny.config(decoder=GROUPED, norm="rms", norm_eps=1e-6, attention_bias=False, positions="rotary", **changes)
    )
    theirs = attention_class(foreign, 0).double().eval()
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    renamed = {".".join([names.get(n, n) for n in key.split(".")]): t for key, t in ours.state_dict().items()}
    loaded = theirs.load_state_dict(renamed, strict=False)
    assert not loaded.unexpected_keys
    assert all(key.endswith("bias") for key in loaded.missing_keys)
    for bias in (parameter for key, parameter in theirs.named_parameters() if key.endswith("bias")):
        nn.init.zeros_(bias)
    x = 3 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(9)[None]
    causal = torch.zeros(9, 9, dtype=torch.float64).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    usual = {"base": 1e4, "dim": 8, "pairs": "halves", "scaling": "none", "factor": 8.0, "original_length": 8192}
    base, dim, pairs, *scaling = (changes.get(f"rotary_{name}", value) for name, value in usual.items())
    rotary = Rotary(base, dim, 8, pairs, (scaling[0], scaling[1], scaling[2]))
    with torch.no_grad():
        expected, _ = theirs(
            hidden_states=x,
            position_embeddings=wide_angles(rotary_class(foreign), positions),
            attention_mask=causal[None, None],
        )
        cache = ConcatCache(empty(tiny.config(decoder=GROUPED), 2), torch.zeros(2, 9))
        rotation = rotary.at(cache.positions.expand(2, -1), torch.float64)
        found = ours(x.flatten(0, 1), cache, 0, rotation=rotation).unflatten(0, (2, 9))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("heads", [4, 8, 6, 12])
def test_alibi_equals_that_of_bloom(heads: int) -> None:
    """Bloom's own bias differs by a number for each row, which softmax cancels."""
    config = tiny.config(decoder={"num_heads": heads, "d_k": 4, "d_v": 4})
    config = replace(config, d_model=4 * heads)
    ours = attention(config)
    theirs = BloomAttention(BloomConfig(hidden_size=4 * heads, n_head=heads), 0).double().eval()
    with torch.no_grad():
        for kind in ("weight", "bias"):
            parts = [getattr(part, kind).unflatten(0, (heads, 4)) for part in (ours.q, ours.k, ours.v)]
            getattr(theirs.query_key_value, kind).copy_(torch.stack(parts, 1).flatten(0, 2))
            getattr(theirs.dense, kind).copy_(getattr(ours.o, kind))
        x = torch.randn(2, 7, 4 * heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        alibi = build_alibi_tensor(torch.ones(2, 7), heads, torch.float64)
        causal = torch.zeros(7, 7, dtype=torch.float64).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        expected = theirs(x, torch.zeros_like(x), alibi, causal[None, None])[0]
        cache = ConcatCache(empty(config, 2), torch.zeros(2, 7))
        bias = Alibi(heads).bias(cache.positions, cache.key_len, torch.float64)
        found = ours(x.flatten(0, 1), cache, 0, bias).unflatten(0, (2, 7))
    # Bloom has its slopes in float32: 2**-0.5 and the like are no numbers of few bits.
    tolerance = TOLERANCE if heads in (4, 8) else 1e-6
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def gemma(**changes: Any) -> Any:
    side = {**SIZES, "num_hidden_layers": 2, "query_pre_attn_scalar": 12, "sliding_window": 64, "bos_token_id": 1}
    side |= changes
    config = T5GemmaConfig(
        encoder=side, decoder={**side, "num_hidden_layers": 3}, vocab_size=31, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    made = T5GemmaForConditionalGeneration(config).double().eval()
    tiny.randomise(made)
    for rotary in (made.model.encoder.rotary_emb, made.model.decoder.rotary_emb):
        rotary.forward = lambda x, positions, rotary=rotary: wide_angles(rotary, positions)
    return made


def test_equals_t5gemma() -> None:
    """Rotary positions, grouped heads, sandwich norms, both soft caps, GeGLU: the whole model at once."""
    theirs = gemma(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ours = canonical(theirs)
    batch = tiny.batch()
    with torch.no_grad():
        expected = theirs(
            input_ids=batch.source_ids, attention_mask=batch.source_mask.long(), decoder_input_ids=batch.target_ids
        )
        found = ours(*batch)
        hidden = ours.hidden_states(batch.source_ids, batch.source_mask)
    assert expected.logits.std() > 0.1
    assert (hidden - expected.encoder_last_hidden_state)[batch.source_mask].abs().max() < TOLERANCE * 10
    assert (found - expected.logits).abs().max() < TOLERANCE * 10
