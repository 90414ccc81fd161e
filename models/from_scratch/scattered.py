from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, TARGET, D, causal, merge, softmax_attention, split


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
