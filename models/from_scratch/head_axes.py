from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, softmax_attention


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
