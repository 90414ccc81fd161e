from __future__ import annotations

import math

from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class Labml(nn.Module):
    """Sequence first; norms are named after the sublayer that follows them."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: Tree(linear=nn.Linear(D, D)) for name in ("query", "key", "value")}
            return Tree(**maps, output=nn.Linear(D, D))

        def network() -> Tree:
            return Tree(layer1=nn.Linear(D, 24), layer2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            norms = {name: nn.LayerNorm(D) for name in ("norm_self_attn", "norm_ff")}
            return Tree(self_attn=attention(), feed_forward=network(), **norms)

        def decoder_layer() -> Tree:
            norms = {name: nn.LayerNorm(D) for name in ("norm_self_attn", "norm_src_attn", "norm_ff")}
            return Tree(self_attn=attention(), src_attn=attention(), feed_forward=network(), **norms)

        def embedding(vocab: int) -> Tree:
            return Tree(linear=nn.Embedding(vocab, D), positional_encodings=waves()[:, None])

        self.encoder = Tree(layers=layers(encoder_layer), norm=nn.LayerNorm(D))
        self.decoder = Tree(layers=layers(decoder_layer), norm=nn.LayerNorm(D))
        self.src_embed, self.tgt_embed = embedding(SOURCE), embedding(TARGET)
        self.generator = Tree(projection=nn.Linear(D, TARGET))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            q, k, v = part.query.linear(x), part.key.linear(memory), part.value.linear(memory)
            return part.output(attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen).transpose(0, 1))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer2(part.layer1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.linear(ids.T) * math.sqrt(D) + side.positional_encodings[: ids.shape[1]]

        memory = embed(self.src_embed, source)
        for layer in self.encoder.layers:
            y = layer.norm_self_attn(memory)
            memory = memory + mix(layer.self_attn, y, y, keep[:, None])
            memory = memory + think(layer.feed_forward, layer.norm_ff(memory))
        memory, x = self.encoder.norm(memory), embed(self.tgt_embed, target)
        for layer in self.decoder.layers:
            y = layer.norm_self_attn(x)
            x = x + mix(layer.self_attn, y, y, causal(target))
            x = x + mix(layer.src_attn, layer.norm_src_attn(x), memory, keep[:, None])
            x = x + think(layer.feed_forward, layer.norm_ff(x))
        return self.generator.projection(self.decoder.norm(x)).transpose(0, 1)
