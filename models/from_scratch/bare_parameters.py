from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention, split, table


class BareParameters(nn.Module):
    """No nn.Linear: matrices are parameters [in, out], norms are written by hand with the unbiased deviation."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            for prefix in ("self", "cross")[: 1 + cross]:
                for name in "qkvo":
                    self.register_parameter(f"{prefix}_W{name}", nn.Parameter(torch.randn(D, D)))
            self.W1, self.b1 = nn.Parameter(torch.randn(D, 36)), nn.Parameter(torch.randn(36))
            self.W2, self.b2 = nn.Parameter(torch.randn(36, D)), nn.Parameter(torch.randn(D))
            for i in range(2 + cross):
                self.register_parameter(f"gain{i}", nn.Parameter(torch.ones(D)))
                self.register_parameter(f"shift{i}", nn.Parameter(torch.zeros(D)))

        def norm(self, x: Tensor, i: int) -> Tensor:
            x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-7)
            return getattr(self, f"gain{i}") * x + getattr(self, f"shift{i}")

        def attend(self, kind: str, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = (split(y @ getattr(self, f"{kind}_W{n}")) for n, y in (("q", x), ("k", memory), ("v", memory)))
            return merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)) @ getattr(self, f"{kind}_Wo")

        def network(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.W1 + self.b1) @ self.W2 + self.b2

    def __init__(self) -> None:
        super().__init__()
        self.src_embedding, self.trg_embedding = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.encoder_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decoder_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.final = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.src_embedding(source) * D**0.5 + table(LENGTH, D).to(self.final.weight)[: source.shape[1]]
        for layer in self.encoder_layers:
            memory = layer.norm(memory + layer.attend("self", memory, memory, keep), 0)
            memory = layer.norm(memory + layer.network(memory), 1)
        x = self.trg_embedding(target) * D**0.5 + table(LENGTH, D).to(self.final.weight)[: target.shape[1]]
        for layer in self.decoder_layers:
            x = layer.norm(x + layer.attend("self", x, x, causal(target)), 0)
            x = layer.norm(x + layer.attend("cross", x, memory, keep), 1)
            x = layer.norm(x + layer.network(x), 2)
        return self.final(x).log_softmax(-1)
