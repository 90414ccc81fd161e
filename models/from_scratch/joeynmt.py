from __future__ import annotations

import math

from torch import Tensor, nn

from models.from_scratch.parts import LAYERS, SOURCE, TARGET, D, Tree, attend, causal, layers, waves


class JoeyNmt(nn.Module):
    """The norm of a layer is that of its attention, the network has its own; residuals may be scaled, here they are."""

    # DeepNet's factors for two layers on each side.
    alphas = 0.81 * (LAYERS**4 * LAYERS) ** (1 / 16), (3 * LAYERS) ** 0.25

    def __init__(self) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(D, eps=1e-6)

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("k_layer", "v_layer", "q_layer", "output_layer")})

        def network() -> Tree:
            return Tree(
                layer_norm=norm(), pwff_layer=nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, D))
            )

        def decoder_layer() -> Tree:
            mixers = {"trg_trg_att": attention(), "src_trg_att": attention()}
            return Tree(**mixers, feed_forward=network(), x_layer_norm=norm(), dec_layer_norm=norm())

        def encoder_layer() -> Tree:
            return Tree(layer_norm=norm(), src_src_att=attention(), feed_forward=network())

        self.src_embed, self.trg_embed = Tree(lut=nn.Embedding(SOURCE, D)), Tree(lut=nn.Embedding(TARGET, D))
        self.encoder = Tree(layers=layers(encoder_layer), pe=Tree(pe=waves()[None]), layer_norm=norm())
        self.decoder = Tree(layers=layers(decoder_layer), pe=Tree(pe=waves()[None]), layer_norm=norm())
        self.decoder.output_layer = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.output_layer(attend(part.q_layer(x), part.k_layer(memory), part.v_layer(memory), seen))

        def think(part: Tree, x: Tensor, alpha: float) -> Tensor:
            return part.pwff_layer(part.layer_norm(x)) + alpha * x

        def embed(table: Tree, side: Tree, ids: Tensor) -> Tensor:
            return table.lut(ids) * math.sqrt(D) + side.pe.pe[:, : ids.shape[1]]

        enc, dec = self.alphas
        memory = embed(self.src_embed, self.encoder, source)
        for layer in self.encoder.layers:
            y = layer.layer_norm(memory)
            memory = think(layer.feed_forward, mix(layer.src_src_att, y, y, keep[:, None]) + enc * memory, enc)
        memory, x = self.encoder.layer_norm(memory), embed(self.trg_embed, self.decoder, target)
        for layer in self.decoder.layers:
            y = layer.x_layer_norm(x)
            x = mix(layer.trg_trg_att, y, y, causal(target)) + dec * x
            x = mix(layer.src_trg_att, layer.dec_layer_norm(x), memory, keep[:, None]) + dec * x
            x = think(layer.feed_forward, x, dec)
        return self.decoder.output_layer(self.decoder.layer_norm(x))
