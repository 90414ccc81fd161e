from __future__ import annotations

from torch import Tensor, nn

from models.from_scratch.parts import HEADS, LENGTH, SOURCE, TARGET, D, Tree, attend, causal, layers


class AladdinPersson(nn.Module):
    """One small projection for all heads, scores divided by the root of the whole width, learned positions."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            small = {name: nn.Linear(D // HEADS, D // HEADS, bias=False) for name in ("values", "keys", "queries")}
            return Tree(**small, fc_out=nn.Linear(D, D))

        def block() -> Tree:
            network = nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D))
            return Tree(attention=attention(), norm1=nn.LayerNorm(D), norm2=nn.LayerNorm(D), feed_forward=network)

        def side(vocab: int) -> Tree:
            return Tree(word_embedding=nn.Embedding(vocab, D), position_embedding=nn.Embedding(LENGTH, D))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(block)
        self.decoder.layers = layers(
            lambda: Tree(norm=nn.LayerNorm(D), attention=attention(), transformer_block=block())
        )
        self.decoder.fc_out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            q, k, v = (
                project(y.unflatten(-1, (HEADS, -1))).flatten(2)
                for project, y in ((part.queries, x), (part.keys, memory), (part.values, memory))
            )
            return part.fc_out(attend(q, k, v, seen, scale=D**-0.5))

        def block(part: Tree, x: Tensor, memory: Tensor) -> Tensor:
            x = part.norm1(x + mix(part.attention, x, memory, keep[:, None]))
            return part.norm2(x + part.feed_forward(x))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.word_embedding(ids) + side.position_embedding.weight[: ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            memory = block(layer, memory, memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.layers:
            x = layer.norm(x + mix(layer.attention, x, x, causal(target)))
            x = block(layer.transformer_block, x, memory)
        return self.decoder.fc_out(x)
