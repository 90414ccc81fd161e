from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.parts import HEADS, SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class FeatherAi(nn.Module):
    """Each head has linear maps of its own, in three lists."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            lists = {
                name: layers(lambda: nn.Linear(D, D // HEADS), HEADS)
                for name in ("linear_Qs", "linear_Ks", "linear_Vs")
            }
            return Tree(**lists, mha_linear=nn.Linear(D, D))

        def norms(count: int) -> dict[str, Tree]:
            return {f"norm_{i}": Tree(layer_norm=nn.LayerNorm(D)) for i in range(1, count + 1)}

        def network() -> Tree:
            return Tree(ff=nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, D)))

        def side(vocab: int) -> Tree:
            return Tree(embedding=Tree(embed=nn.Embedding(vocab, D)), PE=Tree(pe=waves()[None]))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.encoders = layers(lambda: Tree(**norms(2), mha=attention(), ff=network()))
        self.decoder.decoders = layers(
            lambda: Tree(**norms(3), masked_mha=attention(), enc_dec_mha=attention(), ff=network())
        )
        self.linear_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            every = zip(part.linear_Qs, part.linear_Ks, part.linear_Vs, strict=True)
            heads = [attend(q(x), k(memory), v(memory), seen, heads=1) for q, k, v in every]
            return part.mha_linear(torch.cat(heads, -1))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding.embed(ids) * D**0.5 + side.PE.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.encoders:
            memory = layer.norm_1.layer_norm(mix(layer.mha, memory, memory, keep[:, None]) + memory)
            memory = layer.norm_2.layer_norm(layer.ff.ff(memory) + memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.decoders:
            x = layer.norm_1.layer_norm(mix(layer.masked_mha, x, x, causal(target)) + x)
            x = layer.norm_2.layer_norm(mix(layer.enc_dec_mha, x, memory, keep[:, None]) + x)
            x = layer.norm_3.layer_norm(layer.ff.ff(x) + x)
        return self.linear_layer(x)
