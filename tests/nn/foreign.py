"""Canonical twins of models by other hands: Hugging Face Marian, BART, T5 and torch.nn.Transformer.

Each function reads the sizes and switches from the foreign model and copies its
weights, in their dtype. The twin shares no memory with the original and is in eval mode.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from tfexport.contract import TokenIds
from tfexport.nn.attention import MultiHeadAttention
from tfexport.nn.config import Activation, StackConfig, TransformerConfig
from tfexport.nn.layers import LayerNorm
from tfexport.nn.transformer import Block, Stack, Transformer

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def canonical_from_marian(hf_model: Any) -> Transformer:
    """Copy a `MarianMTModel`."""
    model = hf_model.model
    twin = _twin(_marian_like_config(hf_model, embedding_norm=False), hf_model)
    for ours, theirs in ((twin.enc, model.encoder), (_decoder(twin), model.decoder)):
        _fill_marian_like(ours, theirs, first_position=0)
    _fill_output(twin, hf_model.lm_head, hf_model.final_logits_bias)
    return twin


def canonical_from_bart(hf_model: Any) -> Transformer:
    """Copy a `BartForConditionalGeneration`, whose position tables begin at row 2."""
    model = hf_model.model
    twin = _twin(_marian_like_config(hf_model, embedding_norm=True), hf_model)
    for ours, theirs in ((twin.enc, model.encoder), (_decoder(twin), model.decoder)):
        _fill_marian_like(ours, theirs, first_position=2)
        _copy(cast(LayerNorm, ours.emb_norm), theirs.layernorm_embedding)
    _fill_output(twin, hf_model.lm_head, hf_model.final_logits_bias)
    return twin


def canonical_from_t5(hf_model: Any, *, max_length: int = 512) -> Transformer:
    """Copy a `T5ForConditionalGeneration`, v1.0 or v1.1; `max_length` is a limit T5 itself does not have."""
    config = hf_model.config

    def stack(layers: int) -> StackConfig:
        return StackConfig(
            layers=layers,
            num_heads=config.num_heads,
            d_ff=config.d_ff,
            norm_place="pre",
            final_norm=True,
            d_k=config.d_kv,
            d_v=config.d_kv,
        )

    tied = hf_model.lm_head.weight is hf_model.decoder.embed_tokens.weight
    twin = _twin(
        TransformerConfig(
            d_model=config.d_model,
            source_vocab=config.vocab_size,
            target_vocab=config.vocab_size,
            max_source_length=max_length,
            max_target_length=max_length,
            encoder=stack(config.num_layers),
            decoder=stack(config.num_decoder_layers),
            tokens=TokenIds(
                pad=config.pad_token_id, start=config.decoder_start_token_id, eos=_single(config.eos_token_id)
            ),
            norm="rms",
            norm_eps=config.layer_norm_epsilon,
            activation=_ACTIVATIONS[config.dense_act_fn],
            feed_forward="glu" if config.is_gated_act else "mlp",
            relative_bias="t5",
            relative_buckets=config.relative_attention_num_buckets,
            relative_max_distance=config.relative_attention_max_distance,
            positions="none",
            attention_scale=1.0,
            logit_scale=config.d_model**-0.5 if config.scale_decoder_outputs else 1.0,
            attention_bias=False,
            feed_forward_bias=False,
            norm_bias=False,
            output_bias=False,
            tie_embeddings=True,
            tie_output=tied,
            dropout=float(config.dropout_rate),
        ),
        hf_model,
    )
    for ours, theirs in ((twin.enc, hf_model.encoder), (_decoder(twin), hf_model.decoder)):
        _fill_t5_stack(ours, theirs)
    _fill_output(twin, hf_model.lm_head, None)
    return twin


def canonical_from_torch(
    transformer: nn.Transformer,
    source_embedding: nn.Embedding,
    target_embedding: nn.Embedding,
    generator: nn.Linear,
    positions: Tensor,
    tokens: TokenIds,
) -> Transformer:
    """Copy an `nn.Transformer` in the usual shell: embedding · sqrt(d_model) + `positions` [length, d_model]."""
    first: Any = transformer.encoder.layers[0]
    activation = cast(Activation, first.activation.__name__)

    def stack(side: Any) -> StackConfig:
        return StackConfig(
            layers=len(side.layers),
            num_heads=transformer.nhead,
            d_ff=first.linear1.out_features,
            norm_place="pre" if first.norm_first else "post",
            final_norm=side.norm is not None,
        )

    twin = _twin(
        TransformerConfig(
            d_model=transformer.d_model,
            source_vocab=source_embedding.num_embeddings,
            target_vocab=target_embedding.num_embeddings,
            max_source_length=positions.shape[0],
            max_target_length=positions.shape[0],
            encoder=stack(transformer.encoder),
            decoder=stack(transformer.decoder),
            tokens=tokens,
            norm_eps=first.norm1.eps,
            activation=activation,
            embedding_scale=math.sqrt(transformer.d_model),
            dropout=float(first.dropout.p),
        ),
        transformer,
    )
    shells = (
        (twin.enc, transformer.encoder, source_embedding),
        (_decoder(twin), transformer.decoder, target_embedding),
    )
    for ours, theirs, embedding in shells:
        _copy(ours.embed, embedding)
        _copy_tensor(cast(Tensor, ours.pos), positions)
        _fill_torch_stack(ours, theirs)
    _fill_output(twin, generator, generator.bias)
    return twin


def _twin(config: TransformerConfig, like: nn.Module) -> Transformer:
    return Transformer(config).to(next(like.parameters()).dtype).eval()


def _decoder(twin: Transformer) -> Stack:
    assert twin.dec is not None
    return twin.dec


def _single(token: int | list[int]) -> int:
    return token if isinstance(token, int) else token[0]


def _copy_tensor(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
    with torch.no_grad():
        ours.copy_(theirs)


def _copy(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy all parameters of one leaf module; both have the same ones."""
    sources = dict(theirs.named_parameters())
    targets = dict(ours.named_parameters())
    assert sources.keys() == targets.keys(), f"{sorted(targets)} and {sorted(sources)}"
    for name, target in targets.items():
        _copy_tensor(target, sources[name])


def _fill_output(twin: Transformer, head: nn.Linear, bias: Tensor | None) -> None:
    assert twin.out is not None
    _copy_tensor(twin.out.weight, head.weight)
    if bias is not None:
        _copy_tensor(twin.out.bias, bias.reshape(-1))


def _marian_like_config(hf_model: Any, *, embedding_norm: bool) -> TransformerConfig:
    config, model = hf_model.config, hf_model.model
    target_embedding = model.decoder.embed_tokens.weight
    return TransformerConfig(
        d_model=config.d_model,
        source_vocab=model.encoder.embed_tokens.num_embeddings,
        target_vocab=model.decoder.embed_tokens.num_embeddings,
        max_source_length=config.max_position_embeddings,
        max_target_length=config.max_position_embeddings,
        encoder=StackConfig(
            layers=config.encoder_layers,
            num_heads=config.encoder_attention_heads,
            d_ff=config.encoder_ffn_dim,
            norm_place="post",
            final_norm=False,
        ),
        decoder=StackConfig(
            layers=config.decoder_layers,
            num_heads=config.decoder_attention_heads,
            d_ff=config.decoder_ffn_dim,
            norm_place="post",
            final_norm=False,
        ),
        tokens=TokenIds(pad=config.pad_token_id, start=config.decoder_start_token_id, eos=_single(config.eos_token_id)),
        embedding_norm=embedding_norm,
        activation=_ACTIVATIONS[config.activation_function],
        embedding_scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
        tie_embeddings=model.encoder.embed_tokens.weight is target_embedding,
        tie_output=hf_model.lm_head.weight is target_embedding,
        dropout=float(config.dropout),
    )


def _fill_marian_like(ours: Stack, theirs: Any, *, first_position: int) -> None:
    _copy(ours.embed, theirs.embed_tokens)
    _copy_tensor(cast(Tensor, ours.pos), theirs.embed_positions.weight[first_position:])
    for block, layer in zip(cast("list[Block]", ours.layers), theirs.layers, strict=True):
        _copy_projections(block.self, layer.self_attn)
        _copy(block.norm1, layer.self_attn_layer_norm)
        if hasattr(layer, "encoder_attn"):
            _copy_projections(block.cross, layer.encoder_attn)
            _copy(block.norm2, layer.encoder_attn_layer_norm)
        _copy(block.ffn.fc1, layer.fc1)
        _copy(block.ffn.fc2, layer.fc2)
        _copy(_last_norm(block), layer.final_layer_norm)


def _copy_projections(ours: MultiHeadAttention, theirs: Any) -> None:
    for target, source in ((ours.q, "q_proj"), (ours.k, "k_proj"), (ours.v, "v_proj"), (ours.o, "out_proj")):
        _copy(target, getattr(theirs, source))


def _last_norm(block: Block) -> LayerNorm:
    return block.norm3 if hasattr(block, "cross") else block.norm2


def _fill_t5_stack(ours: Stack, theirs: Any) -> None:
    _copy(ours.embed, theirs.embed_tokens)
    bias = theirs.block[0].layer[0].SelfAttention.relative_attention_bias
    _copy(cast(nn.Module, ours.rel_bias), bias)
    _copy(cast(LayerNorm, ours.norm), theirs.final_layer_norm)
    for block, layer in zip(cast("list[Block]", ours.layers), theirs.block, strict=True):
        first, *middle, last = layer.layer
        _copy_t5_attention(block.self, first.SelfAttention)
        _copy(block.norm1, first.layer_norm)
        for cross in middle:
            _copy_t5_attention(block.cross, cross.EncDecAttention)
            _copy(block.norm2, cross.layer_norm)
        dense = last.DenseReluDense
        if block.ffn.gate is not None:
            _copy(block.ffn.gate, dense.wi_1)
        _copy(block.ffn.fc1, dense.wi if block.ffn.gate is None else dense.wi_0)
        _copy(block.ffn.fc2, dense.wo)
        _copy(_last_norm(block), last.layer_norm)


def _copy_t5_attention(ours: MultiHeadAttention, theirs: Any) -> None:
    for name in "qkvo":
        _copy(getattr(ours, name), getattr(theirs, name))


def _fill_torch_stack(ours: Stack, theirs: Any) -> None:
    if ours.norm is not None:
        _copy(ours.norm, theirs.norm)
    for block, layer in zip(cast("list[Block]", ours.layers), theirs.layers, strict=True):
        _copy_fused(block.self, layer.self_attn)
        if hasattr(layer, "multihead_attn"):
            _copy_fused(block.cross, layer.multihead_attn)
            _copy(block.norm3, layer.norm3)
        _copy(block.norm1, layer.norm1)
        _copy(block.norm2, layer.norm2)
        _copy(block.ffn.fc1, layer.linear1)
        _copy(block.ffn.fc2, layer.linear2)


def _copy_fused(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    weights = cast(Tensor, theirs.in_proj_weight).chunk(3)
    biases = theirs.in_proj_bias.chunk(3)
    for target, weight, bias in zip((ours.q, ours.k, ours.v), weights, biases, strict=True):
        _copy_tensor(target.weight, weight)
        _copy_tensor(target.bias, bias)
    _copy(ours.o, theirs.out_proj)


def canonical_from_t5gemma(hf_model: Any, *, max_length: int = 64) -> Transformer:
    """Copy a `T5GemmaForConditionalGeneration`; its norms store what they add to 1."""
    first = hf_model.config.encoder

    def stack(side: Any) -> StackConfig:
        return StackConfig(
            layers=side.num_hidden_layers,
            num_heads=side.num_attention_heads,
            num_kv_heads=side.num_key_value_heads,
            d_ff=side.intermediate_size,
            norm_place="sandwich",
            final_norm=True,
            d_k=side.head_dim,
            d_v=side.head_dim,
        )

    twin = _twin(
        TransformerConfig(
            d_model=first.hidden_size,
            source_vocab=first.vocab_size,
            target_vocab=first.vocab_size,
            max_source_length=max_length,
            max_target_length=max_length,
            encoder=stack(first),
            decoder=stack(hf_model.config.decoder),
            tokens=TokenIds(pad=first.pad_token_id, start=first.bos_token_id, eos=2),
            norm="rms",
            norm_eps=first.rms_norm_eps,
            activation="gelu_tanh",
            feed_forward="glu",
            positions="rotary",
            rotary_base=first.rope_parameters["rope_theta"],
            embedding_scale=math.sqrt(first.hidden_size),
            attention_scale=first.query_pre_attn_scalar**-0.5,
            attention_softcap=first.attn_logit_softcapping,
            logit_softcap=first.final_logit_softcapping,
            attention_bias=False,
            feed_forward_bias=False,
            norm_bias=False,
            output_bias=False,
        ),
        hf_model,
    )
    for ours, theirs in ((twin.enc, hf_model.model.encoder), (_decoder(twin), hf_model.model.decoder)):
        _copy(ours.embed, theirs.embed_tokens)
        _copy_tensor(cast(LayerNorm, ours.norm).weight, 1 + theirs.norm.weight)
        for block, layer in zip(ours.blocks, theirs.layers, strict=True):
            _copy_t5gemma_block(block, layer)
    _copy_tensor(cast(nn.Linear, twin.out).weight, hf_model.lm_head.out_proj.weight)
    return twin


def _copy_t5gemma_block(ours: Block, theirs: Any) -> None:
    sublayers = ["self_attn", *(["cross_attn"] if hasattr(ours, "cross") else []), "feedforward"]
    for number, sublayer in enumerate(sublayers, 1):
        for name, norm in (("norm", "pre"), ("post_norm", "post")):
            gain = getattr(theirs, f"{norm}_{sublayer}_layernorm").weight
            _copy_tensor(getattr(ours, f"{name}{number}").weight, 1 + gain)
    for target, source in (("self", "self_attn"), ("cross", "cross_attn")):
        for part in "qkvo" if hasattr(ours, target) else "":
            _copy(getattr(getattr(ours, target), part), getattr(getattr(theirs, source), f"{part}_proj"))
    for target, source in (("fc1", "gate_proj"), ("gate", "up_proj"), ("fc2", "down_proj")):
        _copy(getattr(ours.ffn, target), getattr(theirs.mlp, source))
