from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class Graykode(nn.Module):
    """Convolutions of width 1; its positions are written out: 1, 2, 3, 4, 0 of a source, 5, 1, 2, 3, 4 of a target."""

    source_len = target_len = 5

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: nn.Linear(D, D) for name in ("W_Q", "W_K", "W_V", "linear")}
            return Tree(**maps, layer_norm=nn.LayerNorm(D))

        def network() -> Tree:
            return Tree(conv1=nn.Conv1d(D, 24, 1), conv2=nn.Conv1d(24, D, 1), layer_norm=nn.LayerNorm(D))

        def positions() -> nn.Embedding:
            return nn.Embedding.from_pretrained(waves(6), freeze=True)

        self.encoder = Tree(
            src_emb=nn.Embedding(SOURCE, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(enc_self_attn=attention(), pos_ffn=network())),
        )
        self.decoder = Tree(
            tgt_emb=nn.Embedding(TARGET, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(dec_self_attn=attention(), dec_enc_attn=attention(), pos_ffn=network())),
        )
        self.projection = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.linear(attend(part.W_Q(x), part.W_K(memory), part.W_V(memory), seen))
            return part.layer_norm(y + x)

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer_norm(part.conv2(part.conv1(x.mT).relu()).mT + x)

        places = torch.tensor([[1, 2, 3, 4, 0], [5, 1, 2, 3, 4]])
        memory = self.encoder.src_emb(source) + self.encoder.pos_emb(places[0, : source.shape[1]])
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb(places[1, : target.shape[1]])
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.projection(x)
