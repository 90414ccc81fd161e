from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention, split, table


class Convolutions(nn.Module):
    """Convolutions of width 1 as feed-forward network, norms inside the sublayers, one after the embedding."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_qs, self.w_ks, self.w_vs = (nn.Linear(D, HEADS * 7, bias=False) for _ in range(3))
            self.fc, self.layer_norm = nn.Linear(HEADS * 7, D, bias=False), nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = split(self.w_qs(x)), split(self.w_ks(memory)), split(self.w_vs(memory))
            return self.layer_norm(x + self.fc(merge(softmax_attention(q, k, v, keep, 7**-0.5))))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_in, self.conv_out = nn.Conv1d(D, 44, 1), nn.Conv1d(44, D, 1)
            self.layer_norm = nn.LayerNorm(D, eps=1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer_norm(x + self.conv_out(F.relu(self.conv_in(x.transpose(1, 2)))).transpose(1, 2))

    class Side(nn.Module):
        def __init__(self, vocab: int, *, cross: bool) -> None:
            super().__init__()
            self.word_emb, self.layer_norm = nn.Embedding(vocab, D), nn.LayerNorm(D, eps=1e-6)
            self.register_buffer("pos_table", table(LENGTH, D)[None])
            names = ["slf_attn", *(["enc_attn"] if cross else [])]
            self.layer_stack = nn.ModuleList(
                nn.ModuleDict({**{name: Convolutions.Attend() for name in names}, "pos_ffn": Convolutions.Network()})
                for _ in range(2)
            )

        def embed(self, ids: Tensor) -> Tensor:
            return self.layer_norm(self.word_emb(ids) + self.pos_table[0, : ids.shape[1]])

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, cross=False), self.Side(TARGET, cross=True)
        self.trg_word_prj = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.layer_stack:
            memory = layer["pos_ffn"](layer["slf_attn"](memory, memory, keep))
        x = self.decoder.embed(target)
        for layer in self.decoder.layer_stack:
            x = layer["slf_attn"](x, x, causal(target))
            x = layer["pos_ffn"](layer["enc_attn"](x, memory, keep))
        return self.trg_word_prj(x)
