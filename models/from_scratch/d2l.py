from __future__ import annotations

from torch import Tensor, nn

from models.from_scratch.parts import LAYERS, SOURCE, TARGET, D, Tree, attend, causal, waves


class D2l(nn.Module):
    """Layers are named block0, block1; attentions without biases; a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in ("W_q", "W_k", "W_v", "W_o")})

        def norms(count: int) -> dict[str, Tree]:
            return {f"addnorm{i}": Tree(ln=nn.LayerNorm(D)) for i in range(1, count + 1)}

        def network() -> Tree:
            return Tree(dense1=nn.Linear(D, 24), dense2=nn.Linear(24, D))

        def encoder_block() -> Tree:
            return Tree(attention=attention(), **norms(2), ffn=network())

        def decoder_block() -> Tree:
            return Tree(attention1=attention(), attention2=attention(), **norms(3), ffn=network())

        self.encoder = Tree(embedding=nn.Embedding(SOURCE, D), pos_encoding=Tree())
        self.encoder.blks = Tree(**{f"block{i}": encoder_block() for i in range(LAYERS)})
        self.decoder = Tree(embedding=nn.Embedding(TARGET, D), pos_encoding=Tree())
        self.decoder.blks = Tree(**{f"block{i}": decoder_block() for i in range(LAYERS)})
        self.decoder.dense = nn.Linear(D, TARGET)
        for side in (self.encoder, self.decoder):
            side.pos_encoding.P = waves()[None]

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.W_o(attend(part.W_q(x), part.W_k(memory), part.W_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.dense2(part.dense1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding(ids) * D**0.5 + side.pos_encoding.P[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for block in self.encoder.blks.children():
            memory = block.addnorm1.ln(mix(block.attention, memory, memory, keep[:, None]) + memory)
            memory = block.addnorm2.ln(think(block.ffn, memory) + memory)
        x = embed(self.decoder, target)
        for block in self.decoder.blks.children():
            x = block.addnorm1.ln(mix(block.attention1, x, x, causal(target)) + x)
            x = block.addnorm2.ln(mix(block.attention2, x, memory, keep[:, None]) + x)
            x = block.addnorm3.ln(think(block.ffn, x) + x)
        return self.decoder.dense(x)
