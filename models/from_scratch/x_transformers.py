from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.parts import HEADS, LAYERS, LENGTH, SOURCE, TARGET, D, Tree, attend, causal


class XTransformers(nn.Module):
    """Sublayers in one list for each side; norms without bias store gain - 1; learned positions are scaled down."""

    width = 6

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.zeros(D)))

        def sublayer(block: Tree) -> nn.ModuleList:
            return nn.ModuleList((nn.ModuleList((norm(),)), block))

        def attention() -> nn.ModuleList:
            wide = HEADS * self.width
            maps = {name: nn.Linear(D, wide, bias=False) for name in ("to_q", "to_k", "to_v")}
            return sublayer(Tree(**maps, to_out=nn.Linear(wide, D, bias=False)))

        def network() -> nn.ModuleList:
            first = nn.Sequential(nn.Linear(D, 20), nn.GELU())
            return sublayer(Tree(ff=nn.Sequential(first, nn.Dropout(), nn.Linear(20, D))))

        def side(vocab: int, kinds: str) -> Tree:
            made = [attention() if kind != "f" else network() for kind in kinds * LAYERS]
            return Tree(
                token_emb=Tree(emb=nn.Embedding(vocab, D)),
                pos_emb=Tree(emb=nn.Embedding(LENGTH, D)),
                attn_layers=Tree(layers=nn.ModuleList(made), final_norm=norm()),
            )

        self.encoder = side(SOURCE, "af")
        self.decoder = Tree(net=side(TARGET, "acf"))
        self.decoder.net.to_logits = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,)) * (part.gamma + 1)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.to_out(attend(part.to_q(x), part.to_k(memory), part.to_v(memory), seen))

        def run(side: Tree, ids: Tensor, memory: Tensor | None, seen: Tensor) -> Tensor:
            x = side.token_emb.emb(ids) + side.pos_emb.emb.weight[: ids.shape[1]] * D**-0.5
            for place, ((norm,), block) in enumerate(side.attn_layers.layers):
                y = normed(norm, x)
                if hasattr(block, "ff"):
                    x = x + block.ff(y)
                elif memory is not None and place % 3 == 1:
                    x = x + mix(block, y, memory, keep[:, None])
                else:
                    x = x + mix(block, y, y, seen)
            return normed(side.attn_layers.final_norm, x)

        memory = run(self.encoder, source, None, keep[:, None])
        return self.decoder.net.to_logits(run(self.decoder.net, target, memory, causal(target)))
