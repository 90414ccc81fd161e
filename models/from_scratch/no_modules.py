from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, parameters, softmax_attention


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
