from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class Wmathor(nn.Module):
    """Norms are made anew in every call, so that none has a parameter; no bias anywhere."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in ("W_Q", "W_K", "W_V", "fc")})

        def network() -> Tree:
            maps = nn.Linear(D, 24, bias=False), nn.ReLU(), nn.Linear(24, D, bias=False)
            return Tree(fc=nn.Sequential(*maps))

        self.encoder = Tree(
            src_emb=nn.Embedding(SOURCE, D),
            pos_emb=Tree(pe=waves()[:, None]),
            layers=layers(lambda: Tree(enc_self_attn=attention(), pos_ffn=network())),
        )
        self.decoder = Tree(
            tgt_emb=nn.Embedding(TARGET, D),
            pos_emb=Tree(pe=waves()[:, None]),
            layers=layers(lambda: Tree(dec_self_attn=attention(), dec_enc_attn=attention(), pos_ffn=network())),
        )
        self.projection = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.fc(attend(part.W_Q(x), part.W_K(memory), part.W_V(memory), seen))
            return F.layer_norm(x + y, (D,))

        def think(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x + part.fc(x), (D,))

        memory = self.encoder.src_emb(source) + self.encoder.pos_emb.pe[: source.shape[1], 0]
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb.pe[: target.shape[1], 0]
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.projection(x)
