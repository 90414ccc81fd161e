from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, SOURCE, TARGET, D, causal, merge, split

BUCKETS, FURTHEST = 16, 128


class Relative(nn.Module):
    """Relative positions in buckets, one table for all layers of a side, RMS norms; Spanish names between English."""

    class Capa(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            for name in ("propia", "cruzada")[: 1 + cross]:
                maps = {part: nn.Linear(D, D, bias=False) for part in ("consulta", "clave", "valor", "salida")}
                setattr(self, name, nn.ModuleDict(maps))
                setattr(self, f"norm_{name}", nn.RMSNorm(D, eps=1e-6))
            self.expandir, self.reducir = nn.Linear(D, 56, bias=False), nn.Linear(56, D, bias=False)
            self.norm_red = nn.RMSNorm(D, eps=1e-6)

        def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
            h = self.norm_propia(x)
            x = x + attend(self.propia, h, h, bias)
            if memory is not None:
                x = x + attend(self.cruzada, self.norm_cruzada(x), memory, seen)
            return x + self.reducir(F.relu(self.expandir(self.norm_red(x))))

    def __init__(self) -> None:
        super().__init__()
        self.palabras, self.words = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.encoder_bias, self.decoder_bias = nn.Embedding(BUCKETS, HEADS), nn.Embedding(BUCKETS, HEADS)
        self.encoder = nn.ModuleList(self.Capa(cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(self.Capa(cross=True) for _ in range(2))
        self.norm_encoder, self.norm_decoder = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.logits = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        seen = torch.zeros(keep.shape)[:, None, None].to(self.words.weight).masked_fill(~keep[:, None, None], -1e9)
        bias = self.encoder_bias(buckets(source.shape[1], both=True)).permute(2, 0, 1) + seen
        memory, x = self.palabras(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.norm_encoder(memory)
        bias = self.decoder_bias(buckets(target.shape[1], both=False)).permute(2, 0, 1)
        bias = bias.masked_fill(~causal(target), -1e9)
        for layer in self.decoder:
            x = layer(x, bias, memory, seen)
        return self.logits(self.norm_decoder(x))


def attend(maps: nn.ModuleDict, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
    q, k, v = (split(maps[part](y)) for part, y in (("consulta", x), ("clave", memory), ("valor", memory)))
    return maps["salida"](merge((q @ k.mT + bias).softmax(-1) @ v))


def buckets(length: int, *, both: bool) -> Tensor:
    """Return the bucket of each distance, int64 [length, length]: exact when near, logarithmic when far."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    half = BUCKETS // (2 if both else 1)
    after = half * (distance < 0) if both else 0
    distance = distance.abs() if both else distance.clamp(min=0)
    near = half // 2
    far = near + (distance.clamp(min=1) / near).log() / math.log(FURTHEST / near) * (half - near)
    return after + torch.where(distance < near, distance, far.long().clamp(max=half - 1))
