from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention, split


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
