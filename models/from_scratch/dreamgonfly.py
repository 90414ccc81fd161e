from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, std_norm, waves


class Dreamgonfly(nn.Module):
    """Its own norm; a misspelt embedding whose weight has a second name, and a third where it is the output's."""

    def __init__(self) -> None:
        super().__init__()

        def sublayer(inner: Tree) -> Tree:
            norm = Tree(gain=nn.Parameter(torch.ones(D)), bias=nn.Parameter(torch.zeros(D)))
            return Tree(sublayer=inner, layer_normalization=norm)

        def attention() -> Tree:
            names = ("query_projection", "key_projection", "value_projection", "final_projection")
            return sublayer(Tree(**{name: nn.Linear(D, D) for name in names}))

        def network() -> Tree:
            maps = nn.Linear(D, 24), nn.Dropout(), nn.ReLU(), nn.Linear(24, D)
            return sublayer(Tree(feed_forward=nn.Sequential(*maps)))

        def embedding(vocab: int) -> Tree:
            table = nn.Embedding(vocab, D)
            return Tree(weight=table.weight, pe=waves()[None], embbedding=table)

        self.encoder = Tree(
            embedding=embedding(SOURCE),
            encoder_layers=layers(
                lambda: Tree(self_attention_layer=attention(), pointwise_feedforward_layer=network())
            ),
        )
        self.decoder = Tree(
            embedding=embedding(TARGET),
            decoder_layers=layers(
                lambda: Tree(
                    self_attention_layer=attention(),
                    memory_attention_layer=attention(),
                    pointwise_feedforward_layer=network(),
                )
            ),
            generator=nn.Linear(D, TARGET),
        )
        self.decoder.generator.weight = self.decoder.embedding.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.layer_normalization.gain, part.layer_normalization.bias, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            maps = part.sublayer
            q, k, v = maps.query_projection(x), maps.key_projection(memory), maps.value_projection(memory)
            return normed(part, x + maps.final_projection(attend(q, k, v, seen)))

        def think(part: Tree, x: Tensor) -> Tensor:
            return normed(part, x + part.sublayer.feed_forward(x))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding.embbedding(ids) * D**0.5 + side.embedding.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.encoder_layers:
            memory = mix(layer.self_attention_layer, memory, memory, keep[:, None])
            memory = think(layer.pointwise_feedforward_layer, memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.decoder_layers:
            x = mix(layer.self_attention_layer, x, x, causal(target))
            x = mix(layer.memory_attention_layer, x, memory, keep[:, None])
            x = think(layer.pointwise_feedforward_layer, x)
        return self.decoder.generator(x)
