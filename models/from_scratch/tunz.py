from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.parts import TARGET, D, Tree, attend, causal, layers


class Tunz(nn.Module):
    """One table for all, under two names and without one at the output; the decoder starts from a vector of zeros."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(D, eps=1e-6)

        def attention() -> Tree:
            names = ("linear_q", "linear_k", "linear_v", "output_layer")
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in names})

        def network() -> Tree:
            return Tree(layer1=nn.Linear(D, 24), layer2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            return Tree(self_attention_norm=norm(), self_attention=attention(), ffn_norm=norm(), ffn=network())

        def decoder_layer() -> Tree:
            return Tree(
                self_attention_norm=norm(),
                self_attention=attention(),
                enc_dec_attention_norm=norm(),
                enc_dec_attention=attention(),
                ffn_norm=norm(),
                ffn=network(),
            )

        half = D // 2
        steps = torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / (half - 1))
        self.register_buffer("inv_timescales", steps.exp())
        self.t_vocab_embedding = nn.Embedding(TARGET, D)
        self.decoder = Tree(layers=layers(decoder_layer), last_norm=norm())
        self.i_vocab_embedding = self.t_vocab_embedding
        self.encoder = Tree(layers=layers(encoder_layer), last_norm=norm())

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """`target` are the inputs of the decoder, whose first id counts for nothing."""

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.output_layer(attend(part.linear_q(x), part.linear_k(memory), part.linear_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer2(part.layer1(x).relu())

        def placed(x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[1])[:, None] * self.get_buffer("inv_timescales")
            return x * D**0.5 + torch.cat((angle.sin(), angle.cos()), 1)

        table = self.t_vocab_embedding
        memory = placed(table(source).masked_fill(~keep[..., None], 0))
        for layer in self.encoder.layers:
            y = layer.self_attention_norm(memory)
            memory = memory + mix(layer.self_attention, y, y, keep[:, None])
            memory = memory + think(layer.ffn, layer.ffn_norm(memory))
        memory = self.encoder.last_norm(memory)
        x = placed(F.pad(table(target[:, 1:]), (0, 0, 1, 0)))
        for layer in self.decoder.layers:
            y = layer.self_attention_norm(x)
            x = x + mix(layer.self_attention, y, y, causal(target))
            x = x + mix(layer.enc_dec_attention, layer.enc_dec_attention_norm(x), memory, keep[:, None])
            x = x + think(layer.ffn, layer.ffn_norm(x))
        return self.decoder.last_norm(x) @ table.weight.T
