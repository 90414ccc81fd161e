from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, table


class NumberedBlocks(nn.Module):
    """No lists but attributes with numbers from 1, torch's attention inside, two decoder norms in unusual order."""

    class EncoderBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = nn.MultiheadAttention(D, HEADS, batch_first=True)
            self.w1, self.w2 = nn.Linear(D, 50), nn.Linear(50, D)
            self.ln_b, self.ln_a = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            x = self.ln_a(x + self.mha(x, x, x, key_padding_mask=padding, need_weights=False)[0])
            return self.ln_b(x + self.w2(F.relu(self.w1(x))))

    class DecoderBlock(EncoderBlock):
        def __init__(self) -> None:
            super().__init__()
            self.cross_mha, self.ln_c = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            x = self.ln_a(x + self.mha(x, x, x, attn_mask=later, need_weights=False)[0])
            x = self.ln_c(x + self.cross_mha(x, memory, memory, key_padding_mask=padding, need_weights=False)[0])
            return self.ln_b(x + self.w2(F.relu(self.w1(x))))

    def __init__(self) -> None:
        super().__init__()
        self.embed_src, self.embed_tgt = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.enc_block1, self.enc_block2 = self.EncoderBlock(), self.EncoderBlock()
        self.dec_block1, self.dec_block2 = self.DecoderBlock(), self.DecoderBlock()
        self.register_buffer("positions", table(LENGTH, D)[:, None])
        self.vocab_proj = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        memory = self.embed_src(source) * D**0.5 + self.positions[: source.shape[1], 0]
        memory = self.enc_block2(self.enc_block1(memory, ~keep), ~keep)
        x = self.embed_tgt(target) * D**0.5 + self.positions[: target.shape[1], 0]
        return self.vocab_proj(self.dec_block2(self.dec_block1(x, memory, ~keep), memory, ~keep))
