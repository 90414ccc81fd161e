from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import LENGTH, SOURCE, TARGET, Attention, D, causal


class Misleading(nn.Module):
    """Norms numbered against their use, cross-attention first, sides without a word: names mislead on purpose."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q", "k", "v", "o")
            if cross:
                self.attention_a = Attention(*names)
            self.attention_b = Attention(*names)
            self.lin_in, self.lin_out = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
            for i in range(2 + cross):
                self.add_module(f"n{i}", nn.LayerNorm(D))

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d, self.p = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D), nn.Embedding(LENGTH, D)
        self.stack1 = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.stack2 = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.o = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.e(source) * D**0.5 + self.p.weight[: source.shape[1]]
        for layer in self.stack1:
            memory = layer.n1(memory + layer.attention_b(memory, memory, keep))
            memory = layer.n0(memory + layer.lin_out(F.gelu(layer.lin_in(memory))))
        x = self.d(target) * D**0.5 + self.p.weight[: target.shape[1]]
        for layer in self.stack2:
            x = layer.n2(x + layer.attention_b(x, x, causal(target)))
            x = layer.n1(x + layer.attention_a(x, memory, keep))
            x = layer.n0(x + layer.lin_out(F.gelu(layer.lin_in(x))))
        return self.o(x)
