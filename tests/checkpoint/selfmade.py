"""Transformers as people write them for themselves, each in another way; none is a copy of a known one.

Every class has `forward(source_ids, source_mask, target_ids)` with masks inside,
True = token, and says in its docstring what is unusual.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SOURCE, TARGET, D, HEADS, LENGTH = 29, 31, 24, 4, 20


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attend; all of [batch, heads, len, d_k], keep broadcast to [batch, heads, len, len]."""
    return ((q @ k.transpose(-1, -2)) * scale).masked_fill(~keep, -1e9).softmax(-1) @ v


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def table(length: int, d: int) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


class SmallProjections(nn.Module):
    """One projection for all heads; the scale is that of the whole width; the decoder holds an encoder block."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = D // HEADS
            self.values, self.keys, self.queries = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.fc_out = nn.Linear(D, D)

        def forward(self, q: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            queries, keys, values = self.queries(split(q)), self.keys(split(memory)), self.values(split(memory))
            return self.fc_out(merge(softmax_attention(queries, keys, values, keep, D**-0.5)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SmallProjections.Attend()
            self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.feed_forward = nn.Sequential(nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D))

        def forward(self, q: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            x = self.norm1(self.attention(q, memory, keep) + q)
            return self.norm2(self.feed_forward(x) + x)

    class DecoderBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(D), SmallProjections.Attend()
            self.transformer_block = SmallProjections.Block()

    class Side(nn.Module):
        def __init__(self, vocab: int, block: Any) -> None:
            super().__init__()
            self.word_embedding, self.position_embedding = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D)
            self.layers = nn.ModuleList(block() for _ in range(2))

        def embed(self, ids: Tensor) -> Tensor:
            return self.word_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, self.Block), self.Side(TARGET, self.DecoderBlock)
        self.decoder.fc_out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.layers:
            memory = layer(memory, memory, keep)
        x = self.decoder.embed(target)
        for layer in self.decoder.layers:
            x = layer.transformer_block(layer.norm(layer.attention(x, x, causal(target)) + x), memory, keep)
        return self.decoder.fc_out(x)


class FusedGates(nn.Module):
    """Fused keys and values, fused gates, root mean square norms, no biases but at the output."""

    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8) * self.g

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = FusedGates.Rms()
            self.to_q, self.to_kv = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False)
            self.to_out = nn.Linear(D, D, bias=False)

        def forward(self, x: Tensor, memory: Tensor | None, keep: Tensor) -> Tensor:
            x = self.norm(x)
            k, v = self.to_kv(x if memory is None else memory).chunk(2, -1)
            return self.to_out(
                merge(softmax_attention(split(self.to_q(x)), split(k), split(v), keep, (D // HEADS) ** -0.5))
            )

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = FusedGates.Rms()
            self.proj_in, self.proj_out = nn.Linear(D, 2 * 40, bias=False), nn.Linear(40, D, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            linear, gate = self.proj_in(self.norm(x)).chunk(2, -1)
            return self.proj_out(linear * F.silu(gate))

    def __init__(self) -> None:
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.register_buffer("pe", table(LENGTH, D))
        self.enc_blocks = nn.ModuleList(nn.ModuleDict({"attn": self.Attend(), "ff": self.Gated()}) for _ in range(2))
        self.dec_blocks = nn.ModuleList(
            nn.ModuleDict({"attn": self.Attend(), "xattn": self.Attend(), "ff": self.Gated()}) for _ in range(3)
        )
        self.enc_norm, self.dec_norm = self.Rms(), self.Rms()
        self.to_logits = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.src_emb(source) * D**0.5 + self.pe[: source.shape[1]]
        for block in self.enc_blocks:
            memory = memory + block["attn"](memory, None, keep)
            memory = memory + block["ff"](memory)
        memory = self.enc_norm(memory)
        x = self.tgt_emb(target) * D**0.5 + self.pe[: target.shape[1]]
        for block in self.dec_blocks:
            x = x + block["attn"](x, None, causal(target))
            x = x + block["xattn"](x, memory, keep)
            x = x + block["ff"](x)
        return self.to_logits(self.dec_norm(x))


class HeadLists(nn.Module):
    """Every head has its own linear maps, in a list."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(D, D // HEADS) for _ in range(3))

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(HeadLists.Head() for _ in range(HEADS))
            self.proj = nn.Linear(D, D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            found = [
                softmax_attention(
                    head.query(x)[:, None], head.key(memory)[:, None], head.value(memory)[:, None], keep, 6**-0.5
                )
                for head in self.heads
            ]
            return self.proj(torch.cat(found, -1)[:, 0])

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.sa, self.ln1, self.ln2 = HeadLists.Attend(), nn.LayerNorm(D), nn.LayerNorm(D)
            self.net = nn.Sequential(nn.Linear(D, 60), nn.GELU(), nn.Linear(60, D))
            if cross:
                self.ca, self.ln3 = HeadLists.Attend(), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.source_table, self.target_table = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.source_pos, self.target_pos = nn.Embedding(LENGTH, D), nn.Embedding(LENGTH, D)
        self.encode_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decode_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.head = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.source_table(source) + self.source_pos.weight[: source.shape[1]]
        for layer in self.encode_layers:
            h = layer.ln1(memory)
            memory = memory + layer.sa(h, h, keep)
            memory = memory + layer.net(layer.ln2(memory))
        x = self.target_table(target) + self.target_pos.weight[: target.shape[1]]
        for layer in self.decode_layers:
            h = layer.ln1(x)
            x = x + layer.sa(h, h, causal(target))
            x = x + layer.ca(layer.ln2(x), memory, keep)
            x = x + layer.net(layer.ln3(x))
        return self.head(x)


class NumberedBlocks(nn.Module):
    """No lists but attributes with numbers from 1, torch's attention inside, two decoder norms in unusual order."""

    class EncoderBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(D, HEADS, batch_first=True)
            self.w1, self.w2 = nn.Linear(D, 50), nn.Linear(50, D)
            self.ln_b, self.ln_a = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            x = self.ln_a(x + self.mha(x, x, x, key_padding_mask=padding, need_weights=False)[0])
            return self.ln_b(x + self.w2(F.relu(self.w1(x))))

    class DecoderBlock(EncoderBlock):
        def __init__(self) -> None:
            super().__init__()
            self.cross_mha, self.ln_c = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            x = self.ln_a(x + self.mha(x, x, x, attn_mask=later, need_weights=False)[0])
            x = self.ln_c(x + self.cross_mha(x, memory, memory, key_padding_mask=padding, need_weights=False)[0])
            return self.ln_b(x + self.w2(F.relu(self.w1(x))))

    def __init__(self) -> None:
        super().__init__()
        self.embed_src, self.embed_tgt = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.enc_block1, self.enc_block2 = self.EncoderBlock(), self.EncoderBlock()
        self.dec_block1, self.dec_block2 = self.DecoderBlock(), self.DecoderBlock()
        self.register_buffer("positions", table(LENGTH, D)[:, None])
        self.vocab_proj = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        memory = self.embed_src(source) * D**0.5 + self.positions[: source.shape[1], 0]
        memory = self.enc_block2(self.enc_block1(memory, ~keep), ~keep)
        x = self.embed_tgt(target) * D**0.5 + self.positions[: target.shape[1], 0]
        return self.vocab_proj(self.dec_block2(self.dec_block1(x, memory, ~keep), memory, ~keep))


class Convolutions(nn.Module):
    """Convolutions of width 1 as feed-forward network, norms inside the sublayers, one behind the embedding."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_qs, self.w_ks, self.w_vs = (nn.Linear(D, HEADS * 7, bias=False) for _ in range(3))
            self.fc, self.layer_norm = nn.Linear(HEADS * 7, D, bias=False), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = split(self.w_qs(x)), split(self.w_ks(memory)), split(self.w_vs(memory))
            return self.layer_norm(x + self.fc(merge(softmax_attention(q, k, v, keep, 7**-0.5))))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_in, self.conv_out = nn.Conv1d(D, 44, 1), nn.Conv1d(44, D, 1)
            self.layer_norm = nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer_norm(x + self.conv_out(F.relu(self.conv_in(x.transpose(1, 2)))).transpose(1, 2))

    class Side(nn.Module):
        def __init__(self, vocab: int, *, cross: bool) -> None:
            super().__init__()
            self.word_emb, self.layer_norm = nn.Embedding(vocab, D), nn.LayerNorm(D, eps=1e-6)
            self.register_buffer("pos_table", table(LENGTH, D)[None])
            names = ["slf_attn", *(["enc_attn"] if cross else [])]
            self.layer_stack = nn.ModuleList(
                nn.ModuleDict({**{name: Convolutions.Attend() for name in names}, "pos_ffn": Convolutions.Network()})
                for _ in range(2)
            )

        def embed(self, ids: Tensor) -> Tensor:
            return self.layer_norm(self.word_emb(ids) + self.pos_table[0, : ids.shape[1]])

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, cross=False), self.Side(TARGET, cross=True)
        self.trg_word_prj = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.layer_stack:
            memory = layer["pos_ffn"](layer["slf_attn"](memory, memory, keep))
        x = self.decoder.embed(target)
        for layer in self.decoder.layer_stack:
            x = layer["slf_attn"](x, x, causal(target))
            x = layer["pos_ffn"](layer["enc_attn"](x, memory, keep))
        return self.trg_word_prj(x)


class Mixed(nn.Module):
    """Pre-norm encoder, post-norm decoder, learned positions from row 2, one table for source, target and output."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.ModuleDict({name: nn.Linear(D, D) for name in ("query", "key", "value")})
            self.combine = nn.Linear(D, D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = (split(self.qkv_proj[n](y)) for n, y in (("query", x), ("key", memory), ("value", memory)))
            return self.combine(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.self_attention, self.self_attention_norm = Mixed.Attend(), nn.LayerNorm(D)
            self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))
            self.mlp_norm = nn.LayerNorm(D)
            if cross:
                self.memory_attention, self.memory_attention_norm = Mixed.Attend(), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.position_table = nn.Embedding(TARGET, D), nn.Embedding(LENGTH + 2, D)
        self.encoder = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.encoder_out_norm = nn.LayerNorm(D)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) * D**0.5 + self.position_table(torch.arange(ids.shape[1]) + 2)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.embed(source)
        for layer in self.encoder:
            h = layer.self_attention_norm(memory)
            memory = memory + layer.self_attention(h, h, keep)
            memory = memory + layer.mlp(layer.mlp_norm(memory))
        memory = self.encoder_out_norm(memory)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer.self_attention_norm(x + layer.self_attention(x, x, causal(target)))
            x = layer.memory_attention_norm(x + layer.memory_attention(x, memory, keep))
            x = layer.mlp_norm(x + layer.mlp(x))
        return x @ self.tokens.weight.T


class BareParameters(nn.Module):
    """No nn.Linear: matrices are parameters [in, out], norms are written by hand with the unbiased deviation."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            for prefix in ("self", "cross")[: 1 + cross]:
                for name in "qkvo":
                    self.register_parameter(f"{prefix}_W{name}", nn.Parameter(torch.randn(D, D)))
            self.W1, self.b1 = nn.Parameter(torch.randn(D, 36)), nn.Parameter(torch.randn(36))
            self.W2, self.b2 = nn.Parameter(torch.randn(36, D)), nn.Parameter(torch.randn(D))
            for i in range(2 + cross):
                self.register_parameter(f"gain{i}", nn.Parameter(torch.ones(D)))
                self.register_parameter(f"shift{i}", nn.Parameter(torch.zeros(D)))

        def norm(self, x: Tensor, i: int) -> Tensor:
            x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-7)
            return getattr(self, f"gain{i}") * x + getattr(self, f"shift{i}")

        def attend(self, kind: str, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = (split(y @ getattr(self, f"{kind}_W{n}")) for n, y in (("q", x), ("k", memory), ("v", memory)))
            return merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)) @ getattr(self, f"{kind}_Wo")

        def network(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.W1 + self.b1) @ self.W2 + self.b2

    def __init__(self) -> None:
        super().__init__()
        self.src_embedding, self.trg_embedding = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.encoder_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decoder_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.final = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.src_embedding(source) * D**0.5 + table(LENGTH, D).to(self.final.weight)[: source.shape[1]]
        for layer in self.encoder_layers:
            memory = layer.norm(memory + layer.attend("self", memory, memory, keep), 0)
            memory = layer.norm(memory + layer.network(memory), 1)
        x = self.trg_embedding(target) * D**0.5 + table(LENGTH, D).to(self.final.weight)[: target.shape[1]]
        for layer in self.decoder_layers:
            x = layer.norm(x + layer.attend("self", x, x, causal(target)), 0)
            x = layer.norm(x + layer.attend("cross", x, memory, keep), 1)
            x = layer.norm(x + layer.network(x), 2)
        return self.final(x).log_softmax(-1)


class Scattered(nn.Module):
    """Sublayers lie in lists of their own; one table for source, target and output; gelu by tanh."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(D, D) for _ in range(4))

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = split(self.q_lin(x)), split(self.k_lin(memory)), split(self.v_lin(memory))
            return self.out_lin(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin2(F.gelu(self.lin1(x), approximate="tanh"))

    class Side(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.attentions = nn.ModuleList(Scattered.Attend() for _ in range(2))
            self.layer_norm1, self.layer_norm2 = (nn.ModuleList(nn.LayerNorm(D, 1e-12) for _ in range(2)) for _ in "ab")
            self.ffns = nn.ModuleList(Scattered.Network() for _ in range(2))
            self.layer_norm_emb = nn.LayerNorm(D, 1e-12)
            self.position_embeddings = nn.Embedding(LENGTH, D)
            if cross:
                self.encoder_attn = nn.ModuleList(Scattered.Attend() for _ in range(2))
                self.layer_norm15 = nn.ModuleList(nn.LayerNorm(D, 1e-12) for _ in range(2))

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(TARGET, D)
        self.encoder, self.decoder = self.Side(cross=False), self.Side(cross=True)
        self.pred_bias = nn.Parameter(torch.zeros(TARGET))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep, enc, dec = keep[:, None, None], self.encoder, self.decoder
        memory = enc.layer_norm_emb(self.embeddings(source) + enc.position_embeddings.weight[: source.shape[1]])
        for i in range(2):
            memory = enc.layer_norm1[i](memory + enc.attentions[i](memory, memory, keep))
            memory = enc.layer_norm2[i](memory + enc.ffns[i](memory))
        x = dec.layer_norm_emb(self.embeddings(target) + dec.position_embeddings.weight[: target.shape[1]])
        for i in range(2):
            x = dec.layer_norm1[i](x + dec.attentions[i](x, x, causal(target)))
            x = dec.layer_norm15[i](x + dec.encoder_attn[i](x, memory, keep))
            x = dec.layer_norm2[i](x + dec.ffns[i](x))
        return x @ self.embeddings.weight.T + self.pred_bias


class Alternating(nn.Module):
    """One list in which attention and feed-forward network alternate; fused projections by head, keys first."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kqv, self.o, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q = self.kqv(x).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)[..., 1, :]
            k, _, v = self.kqv(memory).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
            return self.o(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(D, 40), nn.Linear(40, D), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.enc_embed, self.dec_embed = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.pos = nn.Parameter(torch.randn(1, LENGTH, D))
        self.enc = nn.ModuleList(part() for _ in range(2) for part in (self.Attend, self.Network))
        self.dec = nn.ModuleList(part() for _ in range(2) for part in (self.Attend, self.Attend, self.Network))
        self.enc_final, self.dec_final = nn.LayerNorm(D), nn.LayerNorm(D)
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.enc_embed(source) + self.pos[0, : source.shape[1]]
        for attend, network in zip(self.enc[0::2], self.enc[1::2], strict=True):
            h = attend.norm(memory)
            memory = memory + attend(h, h, keep)
            memory = memory + network(network.norm(memory))
        memory = self.enc_final(memory)
        x = self.dec_embed(target) + self.pos[0, : target.shape[1]]
        for own, cross, network in zip(self.dec[0::3], self.dec[1::3], self.dec[2::3], strict=True):
            h = own.norm(x)
            x = x + own(h, h, causal(target))
            x = x + cross(cross.norm(x), memory, keep)
            x = x + network(network.norm(x))
        return self.out(self.dec_final(x))


class HeadAxes(nn.Module):
    """Projections are parameters with an axis for heads, used by einsum; gains are stored around 0."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value"):
                self.register_parameter(name, nn.Parameter(torch.randn(HEADS, D, 5)))
            self.output = nn.Parameter(torch.randn(HEADS, 5, D))

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = (
                torch.einsum("bsd,hdk->bhsk", y, getattr(self, n))
                for n, y in (("query", x), ("key", memory), ("value", memory))
            )
            return torch.einsum("bhsk,hkd->bsd", softmax_attention(q, k, v, keep, 1.0), self.output)

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.masked, self.inter = HeadAxes.Attend(), HeadAxes.Attend() if cross else None
            self.ff1, self.ff2 = nn.Linear(D, 64), nn.Linear(64, D)
            self.norms = nn.ModuleList(nn.LayerNorm(D, eps=1e-3) for _ in range(2 + cross))

    def __init__(self) -> None:
        super().__init__()
        self.enc_tok, self.dec_tok = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.enc_pos, self.dec_pos = nn.Parameter(torch.randn(LENGTH, D)), nn.Parameter(torch.randn(LENGTH, D))
        self.enc_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.dec_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.classifier = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.enc_tok(source) + self.enc_pos[: source.shape[1]]
        for layer in self.enc_layers:
            memory = layer.norms[0](memory + layer.masked(memory, memory, keep))
            memory = layer.norms[1](memory + layer.ff2(F.relu(layer.ff1(memory))))
        x = self.dec_tok(target) + self.dec_pos[: target.shape[1]]
        for layer in self.dec_layers:
            x = layer.norms[0](x + layer.masked(x, x, causal(target)))
            x = layer.norms[1](x + layer.inter(x, memory, keep))
            x = layer.norms[2](x + layer.ff2(F.relu(layer.ff1(x))))
        return self.classifier(x)


class EncoderAlone(nn.Module):
    """No decoder: returns states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(SOURCE, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, HEADS, 30, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(D)

    def forward(self, source: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(source) + self.pos.weight[: source.shape[1]]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~keep)
        return self.ln_f(x)


class Attention(nn.Module):
    """Four linear maps under the given names, in the order of queries, keys, values and output."""

    def __init__(self, *names: str, bias: bool = True) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(D, D, bias=bias))

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        q, k, v, o = (getattr(self, name) for name in self.names)
        return o(merge(softmax_attention(split(q(x)), split(k(memory)), split(v(memory)), keep, (D // HEADS) ** -0.5)))


class Ported(nn.Module):
    """Names of a port from another framework; the table of positions is a plain attribute."""

    class Layer(nn.Module):
        def __init__(self, *attentions: str) -> None:
            super().__init__()
            self.attentions = attentions
            for name in attentions:
                self.add_module(name, Attention("wq", "wk", "wv", "dense"))
            self.ffn = nn.Sequential(nn.Linear(D, 50), nn.ReLU(), nn.Linear(50, D))
            for i in range(1 + len(attentions)):
                self.add_module(f"layernorm{i + 1}", nn.LayerNorm(D, eps=1e-6))

        def forward(self, x: Tensor, *seen: tuple[Tensor | None, Tensor]) -> Tensor:
            for i, (name, (memory, keep)) in enumerate(zip(self.attentions, seen, strict=True)):
                y = getattr(self, name)(x, x if memory is None else memory, keep)
                x = getattr(self, f"layernorm{i + 1}")(x + y)
            return getattr(self, f"layernorm{len(seen) + 1}")(x + self.ffn(x))

    class Side(nn.Module):
        def __init__(self, vocab: int, layers: str, *attentions: str) -> None:
            super().__init__()
            self.embedding, self.pos_encoding = nn.Embedding(vocab, D), table(LENGTH, D)[None]
            self.add_module(layers, nn.ModuleList(Ported.Layer(*attentions) for _ in range(2)))

        def embed(self, ids: Tensor) -> Tensor:
            return self.embedding(ids) * D**0.5 + self.pos_encoding[:, : ids.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Side(SOURCE, "enc_layers", "mha")
        self.decoder = self.Side(TARGET, "dec_layers", "mha1", "mha2")
        self.final_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.enc_layers:
            memory = layer(memory, (None, keep))
        x = self.decoder.embed(target)
        for layer in self.decoder.dec_layers:
            x = layer(x, (None, causal(target)), (memory, keep))
        return self.final_layer(x)


class GptLike(nn.Module):
    """Fused projections of both kinds, causal masks saved as buffers named bias, the output tied to one side."""

    class Attend(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.c_attn = nn.Linear(D, (2 if cross else 3) * D)
            self.q_attn = nn.Linear(D, D) if cross else None
            self.c_proj = nn.Linear(D, D)
            self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril()[None, None])

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            fused = self.c_attn(memory)
            q = fused[..., :D] if self.q_attn is None else self.q_attn(x)
            k, v = fused[..., -2 * D :].chunk(2, -1)
            return self.c_proj(merge(softmax_attention(split(q), split(k), split(v), keep, (D // HEADS) ** -0.5)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(D), GptLike.Attend(cross=False)
            self.ln_2, self.mlp = nn.LayerNorm(D), GptLike.Network()
            if cross:
                self.crossattention, self.ln_cross_attn = GptLike.Attend(cross=True), nn.LayerNorm(D)

    class Side(nn.Module):
        def __init__(self, vocab: int, *, cross: bool) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D)
            self.h = nn.ModuleList(GptLike.Block(cross=cross) for _ in range(2))
            self.ln_f = nn.LayerNorm(D)

        def embed(self, ids: Tensor) -> Tensor:
            return self.wte(ids) + self.wpe.weight[: ids.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, cross=False), self.Side(TARGET, cross=True)
        self.lm_head = nn.Linear(D, TARGET, bias=False)
        self.lm_head.weight = self.decoder.wte.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for block in self.encoder.h:
            y = block.ln_1(memory)
            memory = memory + block.attn(y, y, keep)
            memory = memory + block.mlp(block.ln_2(memory))
        memory = self.encoder.ln_f(memory)
        x = self.decoder.embed(target)
        for block in self.decoder.h:
            y = block.ln_1(x)
            x = x + block.attn(y, y, causal(target))
            x = x + block.crossattention(block.ln_cross_attn(x), memory, keep)
            x = x + block.mlp(block.ln_2(x))
        return self.lm_head(self.decoder.ln_f(x))


class NoEnglish(nn.Module):
    """Not one word that is known: order of definition, shapes and structure have to do."""

    class Schicht(nn.Module):
        def __init__(self, *, quer: bool) -> None:
            super().__init__()
            names = ("abfrage", "schluessel", "wert", "ausgabe")
            self.blick, self.ruhe1 = Attention(*names), nn.LayerNorm(D)
            self.breit, self.schmal, self.ruhe2 = nn.Linear(D, 40), nn.Linear(40, D), nn.LayerNorm(D)
            if quer:
                self.querblick, self.ruhe3 = Attention(*names), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.quelle, self.ziel = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.register_buffer("lage", table(LENGTH, D))
        self.lesen = nn.ModuleList(self.Schicht(quer=False) for _ in range(2))
        self.schreiben = nn.ModuleList(self.Schicht(quer=True) for _ in range(2))
        self.worte = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.quelle(source) + self.lage[: source.shape[1]]
        for layer in self.lesen:
            memory = layer.ruhe1(memory + layer.blick(memory, memory, keep))
            memory = layer.ruhe2(memory + layer.schmal(F.relu(layer.breit(memory))))
        x = self.ziel(target) + self.lage[: target.shape[1]]
        for layer in self.schreiben:
            x = layer.ruhe1(x + layer.blick(x, x, causal(target)))
            x = layer.ruhe2(x + layer.querblick(x, memory, keep))
            x = layer.ruhe3(x + layer.schmal(F.relu(layer.breit(x))))
        return self.worte(x)


class Square(nn.Module):
    """The inner width is d_model, three layers and one, layer norms without bias."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q_linear", "k_linear", "v_linear", "out")
            for i in range(1 + cross):
                self.add_module(f"attn_{i + 1}", Attention(*names, bias=False))
            for i in range(2 + cross):
                self.add_module(f"norm_{i + 1}", nn.LayerNorm(D, bias=False))
            self.ff = nn.ModuleDict({"linear_1": nn.Linear(D, D), "linear_2": nn.Linear(D, D)})

        def network(self, x: Tensor) -> Tensor:
            return self.ff["linear_2"](F.relu(self.ff["linear_1"](x)))

    class Side(nn.Module):
        def __init__(self, vocab: int, layers: int, *, cross: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, D)
            self.register_buffer("pe", table(LENGTH, D)[None])
            self.layers = nn.ModuleList(Square.Layer(cross=cross) for _ in range(layers))
            self.norm = nn.LayerNorm(D, bias=False)

        def look_up(self, ids: Tensor) -> Tensor:
            return self.embed(ids) * D**0.5 + self.pe[:, : ids.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, 3, cross=False), self.Side(TARGET, 1, cross=True)
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.look_up(source)
        for layer in self.encoder.layers:
            y = layer.norm_1(memory)
            memory = memory + layer.attn_1(y, y, keep)
            memory = memory + layer.network(layer.norm_2(memory))
        memory = self.encoder.norm(memory)
        x = self.decoder.look_up(target)
        for layer in self.decoder.layers:
            y = layer.norm_1(x)
            x = x + layer.attn_1(y, y, causal(target))
            x = x + layer.attn_2(layer.norm_2(x), memory, keep)
            x = x + layer.network(layer.norm_3(x))
        return self.out(self.decoder.norm(x))


class Misleading(nn.Module):
    """Norms numbered against their use, cross-attention first, sides without a word: names mislead on purpose."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q", "k", "v", "o")
            if cross:
                self.attention_a = Attention(*names)
            self.attention_b = Attention(*names)
            self.lin_in, self.lin_out = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
            for i in range(2 + cross):
                self.add_module(f"n{i}", nn.LayerNorm(D))

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d, self.p = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D), nn.Embedding(LENGTH, D)
        self.stack1 = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.stack2 = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.o = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.e(source) * D**0.5 + self.p.weight[: source.shape[1]]
        for layer in self.stack1:
            memory = layer.n1(memory + layer.attention_b(memory, memory, keep))
            memory = layer.n0(memory + layer.lin_out(F.gelu(layer.lin_in(memory))))
        x = self.d(target) * D**0.5 + self.p.weight[: target.shape[1]]
        for layer in self.stack2:
            x = layer.n2(x + layer.attention_b(x, x, causal(target)))
            x = layer.n1(x + layer.attention_a(x, memory, keep))
            x = layer.n0(x + layer.lin_out(F.gelu(layer.lin_in(x))))
        return self.o(x)


def parameters(module: nn.Module, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))


class NoModules(nn.Module):
    """Not one module with a weight: embeddings, projections by head with their biases and logits are parameters."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            axes, width = (HEADS, D, 6), (HEADS, 6)
            parameters(self, W_Q=axes, W_K=axes, W_V=axes, W_O=(HEADS, 6, D))
            parameters(self, b_Q=width, b_K=width, b_V=width, b_O=(D,))

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            ways = ((x, self.W_Q, self.b_Q), (memory, self.W_K, self.b_K), (memory, self.W_V, self.b_V))
            q, k, v = (torch.einsum("bsd,hdk->bhsk", y, w) + b[:, None] for y, w, b in ways)
            return torch.einsum("bhsk,hkd->bsd", softmax_attention(q, k, v, keep, 6**-0.5), self.W_O) + self.b_O

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parameters(self, W_in=(D, 40), b_in=(40,), W_out=(40, D), b_out=(D,))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.W_in + self.b_in) @ self.W_out + self.b_out

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,), self.w, self.b)

    class Block(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.ln1, self.attn = NoModules.Norm(), NoModules.Attend()
            if cross:
                self.ln_cross, self.cross_attn = NoModules.Norm(), NoModules.Attend()
            self.ln2, self.mlp = NoModules.Norm(), NoModules.Network()

    def __init__(self) -> None:
        super().__init__()
        parameters(self, src_E=(SOURCE, D), tgt_E=(TARGET, D), W_pos=(LENGTH, D), W_U=(D, TARGET), b_U=(TARGET,))
        self.enc_blocks = nn.ModuleList(self.Block(cross=False) for _ in range(2))
        self.dec_blocks = nn.ModuleList(self.Block(cross=True) for _ in range(2))
        self.ln_final = self.Norm()

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.src_E[source] + self.W_pos[: source.shape[1]]
        for block in self.enc_blocks:
            y = block.ln1(memory)
            memory = memory + block.attn(y, y, keep)
            memory = memory + block.mlp(block.ln2(memory))
        x = self.tgt_E[target] + self.W_pos[: target.shape[1]]
        for block in self.dec_blocks:
            y = block.ln1(x)
            x = x + block.attn(y, y, causal(target))
            x = x + block.cross_attn(block.ln_cross(x), memory, keep)
            x = x + block.mlp(block.ln2(x))
        return self.ln_final(x) @ self.W_U + self.b_U


class OneForBoth(nn.Module):
    """Both sides share embedding, positions and the norms before and behind the stack; norms are named for what was."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            self.self_attn = Attention(*names)
            if cross:
                self.cross_attn = Attention(*names)
            self.up_proj, self.down_proj = nn.Linear(D, 40), nn.Linear(40, D)
            self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(D), nn.LayerNorm(D)
            if cross:
                self.post_cross_attention_layernorm = nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.token_table, self.places = nn.Embedding(TARGET, D), nn.Embedding(TARGET + 9, D)
        self.embed_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.enc_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.dec_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_norm(self.token_table(ids) + self.places.weight[: ids.shape[1]])

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory, x = self.embed(source), self.embed(target)
        for layer in self.enc_layers:
            y = layer.input_layernorm(memory)
            memory = memory + layer.self_attn(y, y, keep)
            memory = memory + layer.down_proj(F.gelu(layer.up_proj(layer.post_attention_layernorm(memory))))
        memory = self.norm(memory)
        for layer in self.dec_layers:
            y = layer.input_layernorm(x)
            x = x + layer.self_attn(y, y, causal(target))
            x = x + layer.cross_attn(layer.post_attention_layernorm(x), memory, keep)
            x = x + layer.down_proj(F.gelu(layer.up_proj(layer.post_cross_attention_layernorm(x))))
        return self.norm(x) @ self.token_table.weight.T


class OfToday(nn.Module):
    """Rotary positions of pairs that lie side by side, two key heads for four, norms of each head, gated, no biases."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wo = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
            self.wk, self.wv = nn.Linear(D, D // 2, bias=False), nn.Linear(D, D // 2, bias=False)
            self.q_norm, self.k_norm = nn.RMSNorm(D // HEADS, eps=1e-6), nn.RMSNorm(D // HEADS, eps=1e-6)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor, *, is_self: bool = True) -> Tensor:
            q, k = self.q_norm(split(self.wq(x))), self.k_norm(split(self.wk(memory), HEADS // 2))
            v = split(self.wv(memory), HEADS // 2)
            if is_self:
                q, k = OfToday.turned(q), OfToday.turned(k)
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return self.wo(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.attention_norm, self.attention = nn.RMSNorm(D, eps=1e-6), OfToday.Attend()
            if cross:
                self.cross_norm, self.cross_attention = nn.RMSNorm(D, eps=1e-6), OfToday.Attend()
            self.ffn_norm = nn.RMSNorm(D, eps=1e-6)
            self.w1, self.w3 = nn.Linear(D, 64, bias=False), nn.Linear(D, 64, bias=False)
            self.w2 = nn.Linear(64, D, bias=False)

        def network(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 1.0 / 10000.0 ** (torch.arange(0, 2 * half, 2) / (2 * half))
        angle = torch.arange(x.shape[2]).to(x.dtype)[:, None] * frequency
        pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def __init__(self) -> None:
        super().__init__()
        self.src_tok, self.tgt_tok = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.encoder = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.lm_head = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.src_tok(source)
        for layer in self.encoder:
            h = layer.attention_norm(memory)
            memory = memory + layer.attention(h, h, keep)
            memory = memory + layer.network(layer.ffn_norm(memory))
        memory, x = self.encoder_norm(memory), self.tgt_tok(target)
        for layer in self.decoder:
            h = layer.attention_norm(x)
            x = x + layer.attention(h, h, causal(target))
            x = x + layer.cross_attention(layer.cross_norm(x), memory, keep, is_self=False)
            x = x + layer.network(layer.ffn_norm(x))
        return self.lm_head(self.decoder_norm(x))


SELFMADE: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        SmallProjections,
        FusedGates,
        HeadLists,
        NumberedBlocks,
        Convolutions,
        Mixed,
        BareParameters,
        Scattered,
        Alternating,
        HeadAxes,
        EncoderAlone,
        Ported,
        GptLike,
        NoEnglish,
        Square,
        Misleading,
        NoModules,
        OneForBoth,
        OfToday,
    )
}
