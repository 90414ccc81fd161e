from __future__ import annotations

import math

from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves_by_column


class Devjwsong(nn.Module):
    """A table with a wavelength for every column, kept outside of the state dict; log-probabilities."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(layer=nn.LayerNorm(D, eps=1e-6))

        def norms(count: int) -> dict[str, Tree]:
            return {f"layer_norm_{i}": norm() for i in range(1, count + 1)}

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("w_q", "w_k", "w_v", "w_0")})

        def network() -> Tree:
            return Tree(linear_1=nn.Linear(D, 24), linear_2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            return Tree(**norms(2), multihead_attention=attention(), feed_forward=network())

        def decoder_layer() -> Tree:
            mixers = {"masked_multihead_attention": attention(), "multihead_attention": attention()}
            return Tree(**norms(3), **mixers, feed_forward=network())

        self.src_embedding, self.trg_embedding = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.positional_encoder = Tree()
        vars(self.positional_encoder)["positional_encoding"] = waves_by_column()[None]
        self.encoder = Tree(layers=layers(encoder_layer), layer_norm=norm())
        self.decoder = Tree(layers=layers(decoder_layer), layer_norm=norm())
        self.output_linear = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.w_0(attend(part.w_q(x), part.w_k(memory), part.w_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear_2(part.linear_1(x).relu())

        def embed(table: nn.Module, ids: Tensor) -> Tensor:
            return table(ids) * math.sqrt(D) + self.positional_encoder.positional_encoding[:, : ids.shape[1]]

        memory = embed(self.src_embedding, source)
        for layer in self.encoder.layers:
            y = layer.layer_norm_1.layer(memory)
            memory = memory + mix(layer.multihead_attention, y, y, keep[:, None])
            memory = memory + think(layer.feed_forward, layer.layer_norm_2.layer(memory))
        memory, x = self.encoder.layer_norm.layer(memory), embed(self.trg_embedding, target)
        for layer in self.decoder.layers:
            y = layer.layer_norm_1.layer(x)
            x = x + mix(layer.masked_multihead_attention, y, y, causal(target))
            x = x + mix(layer.multihead_attention, layer.layer_norm_2.layer(x), memory, keep[:, None])
            x = x + think(layer.feed_forward, layer.layer_norm_3.layer(x))
        return self.output_linear(self.decoder.layer_norm.layer(x)).log_softmax(-1)
