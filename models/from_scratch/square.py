from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import LENGTH, SOURCE, TARGET, Attention, D, causal, table


class Square(nn.Module):
    """The inner width is d_model, three layers and one, layer norms without bias."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q_linear", "k_linear", "v_linear", "out")
            for i in range(1 + cross):
                self.add_module(f"attn_{i + 1}", Attention(*names, bias=False))
            for i in range(2 + cross):
                self.add_module(f"norm_{i + 1}", nn.LayerNorm(D, bias=False))
            self.ff = nn.ModuleDict({"linear_1": nn.Linear(D, D), "linear_2": nn.Linear(D, D)})

        def network(self, x: Tensor) -> Tensor:
            return self.ff["linear_2"](F.relu(self.ff["linear_1"](x)))

    class Side(nn.Module):
        def __init__(self, vocab: int, layers: int, *, cross: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, D)
            self.register_buffer("pe", table(LENGTH, D)[None])
            self.layers = nn.ModuleList(Square.Layer(cross=cross) for _ in range(layers))
            self.norm = nn.LayerNorm(D, bias=False)

        def look_up(self, ids: Tensor) -> Tensor:
            return self.embed(ids) * D**0.5 + self.pe[:, : ids.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, 3, cross=False), self.Side(TARGET, 1, cross=True)
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.look_up(source)
        for layer in self.encoder.layers:
            y = layer.norm_1(memory)
            memory = memory + layer.attn_1(y, y, keep)
            memory = memory + layer.network(layer.norm_2(memory))
        memory = self.encoder.norm(memory)
        x = self.decoder.look_up(target)
        for layer in self.decoder.layers:
            y = layer.norm_1(x)
            x = x + layer.attn_1(y, y, causal(target))
            x = x + layer.attn_2(layer.norm_2(x), memory, keep)
            x = x + layer.network(layer.norm_3(x))
        return self.out(self.decoder.norm(x))
