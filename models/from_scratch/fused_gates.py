from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention, split, table


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
