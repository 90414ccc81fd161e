from __future__ import annotations

import math

from torch import Tensor, nn

from models.from_scratch.parts import HEADS, TARGET, D, Tree, attend, causal, layers, waves


class Sgrvinod(nn.Module):
    """Layers are lists of sublayers that hold their norms; keys and values are one map; one table for all."""

    width = 6

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            wide = HEADS * self.width
            maps = {
                "cast_queries": nn.Linear(D, wide),
                "cast_keys_values": nn.Linear(D, 2 * wide),
                "cast_output": nn.Linear(wide, D),
            }
            return Tree(**maps, layer_norm=nn.LayerNorm(D))

        def network() -> Tree:
            return Tree(layer_norm=nn.LayerNorm(D), fc1=nn.Linear(D, 20), fc2=nn.Linear(20, D))

        shared = nn.Embedding(TARGET, D)
        self.encoder = Tree(
            embedding=shared,
            encoder_layers=layers(lambda: nn.ModuleList((attention(), network()))),
            layer_norm=nn.LayerNorm(D),
        )
        self.decoder = Tree(
            embedding=shared,
            decoder_layers=layers(lambda: nn.ModuleList((attention(), attention(), network()))),
            layer_norm=nn.LayerNorm(D),
            fc=nn.Linear(D, TARGET),
        )
        self.decoder.fc.weight = shared.weight
        self.positional_encoding = waves()[None]

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor | None, seen: Tensor) -> Tensor:
            y = part.layer_norm(x)
            k, v = part.cast_keys_values(y if memory is None else memory).chunk(2, -1)
            return x + part.cast_output(attend(part.cast_queries(y), k, v, seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return x + part.fc2(part.fc1(part.layer_norm(x)).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding(ids) * math.sqrt(D) + self.positional_encoding[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for attention, network in self.encoder.encoder_layers:
            memory = think(network, mix(attention, memory, None, keep[:, None]))
        memory, x = self.encoder.layer_norm(memory), embed(self.decoder, target)
        for attention, across, network in self.decoder.decoder_layers:
            x = think(network, mix(across, mix(attention, x, None, causal(target)), memory, keep[:, None]))
        return self.decoder.fc(self.decoder.layer_norm(x))
