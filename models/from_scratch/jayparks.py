from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, std_norm, waves


class JayParks(nn.Module):
    """Its own norm, linear maps inside modules of its own, positions from 1: row 0 of the table is the padding's."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            heads = Tree(**{name: Tree(linear=nn.Linear(D, D)) for name in ("w_q", "w_k", "w_v")})
            return Tree(multihead_attn=heads, proj=Tree(linear=nn.Linear(D, D)), layer_norm=norm())

        def network() -> Tree:
            return Tree(conv1=nn.Conv1d(D, 24, 1), conv2=nn.Conv1d(24, D, 1), layer_norm=norm())

        def positions() -> Tree:
            table = torch.cat((torch.zeros(1, D), waves()))
            return Tree(pos_enc=nn.Embedding.from_pretrained(table, freeze=True))

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
        self.tgt_proj = Tree(linear=nn.Linear(D, TARGET, bias=False))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.layer_norm.gamma, part.layer_norm.beta, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            maps = part.multihead_attn
            y = attend(maps.w_q.linear(x), maps.w_k.linear(memory), maps.w_v.linear(memory), seen)
            return normed(part, x + part.proj.linear(y))

        def think(part: Tree, x: Tensor) -> Tensor:
            return normed(part, x + part.conv2(part.conv1(x.mT).relu()).mT)

        def places(ids: Tensor, seen: Tensor) -> Tensor:
            return torch.where(seen, torch.arange(1, ids.shape[1] + 1), 0)

        is_target = torch.ones_like(target, dtype=torch.bool)
        memory = self.encoder.src_emb(source) + self.encoder.pos_emb.pos_enc(places(source, keep))
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb.pos_enc(places(target, is_target))
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.tgt_proj.linear(x)
