from __future__ import annotations

from torch import Tensor, nn

from models.from_scratch.parts import TARGET, D, Tree, attend, causal, layers, waves


class Jadore801120(nn.Module):
    """Embeddings are normed, attentions have no biases; one table for all, and logits scaled for it."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: nn.Linear(D, D, bias=False) for name in ("w_qs", "w_ks", "w_vs", "fc")}
            return Tree(**maps, layer_norm=nn.LayerNorm(D, eps=1e-6))

        def network() -> Tree:
            return Tree(w_1=nn.Linear(D, 24), w_2=nn.Linear(24, D), layer_norm=nn.LayerNorm(D, eps=1e-6))

        def side(**parts: object) -> Tree:
            table = Tree(pos_table=waves()[None])
            return Tree(**parts, position_enc=table, layer_norm=nn.LayerNorm(D, eps=1e-6))

        shared = nn.Embedding(TARGET, D)
        self.encoder = side(
            src_word_emb=shared, layer_stack=layers(lambda: Tree(slf_attn=attention(), pos_ffn=network()))
        )
        self.decoder = side(
            trg_word_emb=shared,
            layer_stack=layers(lambda: Tree(slf_attn=attention(), enc_attn=attention(), pos_ffn=network())),
        )
        self.trg_word_prj = nn.Linear(D, TARGET, bias=False)
        self.trg_word_prj.weight = shared.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.fc(attend(part.w_qs(x), part.w_ks(memory), part.w_vs(memory), seen))
            return part.layer_norm(x + y)

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer_norm(x + part.w_2(part.w_1(x).relu()))

        def embed(side: Tree, table: nn.Module, ids: Tensor) -> Tensor:
            return side.layer_norm(table(ids) + side.position_enc.pos_table[:, : ids.shape[1]])

        memory = embed(self.encoder, self.encoder.src_word_emb, source)
        for layer in self.encoder.layer_stack:
            memory = think(layer.pos_ffn, mix(layer.slf_attn, memory, memory, keep[:, None]))
        x = embed(self.decoder, self.decoder.trg_word_emb, target)
        for layer in self.decoder.layer_stack:
            x = mix(layer.slf_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.enc_attn, x, memory, keep[:, None]))
        return self.trg_word_prj(x) * D**-0.5
