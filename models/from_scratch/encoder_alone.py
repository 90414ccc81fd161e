from __future__ import annotations

from torch import Tensor, nn

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, D


class EncoderAlone(nn.Module):
    """No decoder: returns states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(SOURCE, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, HEADS, 30, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(D)

    def forward(self, source: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(source) + self.pos.weight[: source.shape[1]]
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~keep)
        return self.ln_f(x)
