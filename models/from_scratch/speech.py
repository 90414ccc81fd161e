"""Speech to text: convolutions that shorten the features, and the layers of torch.nn."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Front = Literal["halved", "quartered", "images", "linear"]


def sinusoids(length: int, d_model: int) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


def first(lengths: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


class Speech(nn.Module):
    """Features [batch, frames, dim] become text; the convolutions read no padding."""

    def __init__(self, front: Front = "halved", dim: int = 20, d_model: int = 32, vocab: int = 40) -> None:
        super().__init__()
        self.front, self.scale = front, math.sqrt(d_model)
        if front == "halved":  # as in Whisper
            self.conv1 = nn.Conv1d(dim, d_model, 3, padding=1)
            self.conv2 = nn.Conv1d(d_model, d_model, 3, stride=2, padding=1)
            self.convolutions, self.activation = [self.conv1, self.conv2], F.gelu
        elif front == "quartered":
            self.convs = nn.ModuleList([nn.Conv1d(dim, 48, 5, 2, 2), nn.Conv1d(48, d_model, 5, 2, 2)])
            self.convolutions, self.activation = list(self.convs), F.relu
        elif front == "images":  # the features are an image of one channel
            self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
            self.linear = nn.Linear(8 * (((dim - 1) // 2 - 1) // 2), d_model)
        else:
            self.linear = nn.Linear(dim, d_model)
        self.register_buffer("positions", sinusoids(400, d_model))
        layer = {"nhead": 4, "dim_feedforward": 64, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, **layer), 2, nn.LayerNorm(d_model), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(d_model, **layer), 2, nn.LayerNorm(d_model))
        self.embed = nn.Embedding(vocab, d_model)
        self.out = nn.Linear(d_model, vocab)

    def subsampled(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        lengths = mask.sum(1)
        if self.front == "images":
            x = self.conv(x[:, None]).transpose(1, 2).flatten(2)
            lengths = ((lengths - 1) // 2 - 1) // 2
        elif self.front != "linear":
            for convolution in self.convolutions:
                x = x * first(lengths, x.shape[1])[..., None]
                x = self.activation(convolution(x.transpose(1, 2))).transpose(1, 2)
                lengths = (lengths - 1) // convolution.stride[0] + 1
        x = self.linear(x) if self.front in ("images", "linear") else x
        return x, first(lengths, x.shape[1])

    def forward(self, features: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
        x, mask = self.subsampled(features, mask)
        states = self.encoder(x + self.positions[: x.shape[1]], src_key_padding_mask=~mask)
        y = self.embed(target_ids) * self.scale + self.positions[: target_ids.shape[1]]
        later = torch.ones(target_ids.shape[1], target_ids.shape[1], dtype=torch.bool, device=y.device).triu(1)
        return self.out(self.decoder(y, states, tgt_mask=later, memory_key_padding_mask=~mask))
