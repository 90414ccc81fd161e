from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, SOURCE, TARGET, D, causal, merge, softmax_attention, split


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
