from __future__ import annotations

import math

from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class Sooftware(nn.Module):
    """Post-norm encoder, pre-norm decoder without a final norm."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("linear_q", "linear_k", "linear_v", "linear")})

        def network() -> Tree:
            maps = nn.Linear(D, 24), nn.Dropout(), nn.ReLU(), nn.Linear(24, D)
            return Tree(feed_forward=nn.Sequential(*maps))

        def add_norm(inner: Tree) -> Tree:
            return Tree(sublayer=inner, layer_norm=nn.LayerNorm(D))

        def decoder_layer() -> Tree:
            names = ("self_attention_prenorm", "decoder_attention_prenorm", "feed_forward_prenorm")
            return Tree(
                **{name: nn.LayerNorm(D) for name in names},
                self_attention=attention(),
                decoder_attention=attention(),
                feed_forward=network(),
            )

        def embedding(vocab: int) -> Tree:
            return Tree(embedding=nn.Embedding(vocab, D))

        self.encoder = Tree(
            embedding=embedding(SOURCE),
            pos_encoding=Tree(pe=waves()[None]),
            layers=layers(lambda: Tree(self_attention=add_norm(attention()), feed_forward=add_norm(network()))),
        )
        self.decoder = Tree(
            embedding=embedding(TARGET),
            positional_encoding=Tree(pe=waves()[None]),
            layers=layers(decoder_layer),
            fc=nn.Linear(D, TARGET, bias=False),
        )

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.linear(attend(part.linear_q(x), part.linear_k(memory), part.linear_v(memory), seen))

        memory = self.encoder.embedding.embedding(source) * math.sqrt(D)
        memory = memory + self.encoder.pos_encoding.pe[:, : source.shape[1]]
        for layer in self.encoder.layers:
            part = layer.self_attention
            memory = part.layer_norm(mix(part.sublayer, memory, memory, keep[:, None]) + memory)
            part = layer.feed_forward
            memory = part.layer_norm(part.sublayer.feed_forward(memory) + memory)
        x = self.decoder.embedding.embedding(target) * math.sqrt(D)
        x = x + self.decoder.positional_encoding.pe[:, : target.shape[1]]
        for layer in self.decoder.layers:
            y = layer.self_attention_prenorm(x)
            x = x + mix(layer.self_attention, y, y, causal(target))
            x = x + mix(layer.decoder_attention, layer.decoder_attention_prenorm(x), memory, keep[:, None])
            x = x + layer.feed_forward.feed_forward(layer.feed_forward_prenorm(x))
        return self.decoder.fc(x).log_softmax(-1)
