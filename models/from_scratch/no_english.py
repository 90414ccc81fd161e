from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import LENGTH, SOURCE, TARGET, Attention, D, causal, table


class NoEnglish(nn.Module):
    """Not one word that is known: order of definition, shapes and structure have to do."""

    class Schicht(nn.Module):
        def __init__(self, *, quer: bool) -> None:
            super().__init__()
            names = ("abfrage", "schluessel", "wert", "ausgabe")
            self.blick, self.ruhe1 = Attention(*names), nn.LayerNorm(D)
            self.breit, self.schmal, self.ruhe2 = nn.Linear(D, 40), nn.Linear(40, D), nn.LayerNorm(D)
            if quer:
                self.querblick, self.ruhe3 = Attention(*names), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.quelle, self.ziel = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.register_buffer("lage", table(LENGTH, D))
        self.lesen = nn.ModuleList(self.Schicht(quer=False) for _ in range(2))
        self.schreiben = nn.ModuleList(self.Schicht(quer=True) for _ in range(2))
        self.worte = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.quelle(source) + self.lage[: source.shape[1]]
        for layer in self.lesen:
            memory = layer.ruhe1(memory + layer.blick(memory, memory, keep))
            memory = layer.ruhe2(memory + layer.schmal(F.relu(layer.breit(memory))))
        x = self.ziel(target) + self.lage[: target.shape[1]]
        for layer in self.schreiben:
            x = layer.ruhe1(x + layer.blick(x, x, causal(target)))
            x = layer.ruhe2(x + layer.querblick(x, memory, keep))
            x = layer.ruhe3(x + layer.schmal(F.relu(layer.breit(x))))
        return self.worte(x)
