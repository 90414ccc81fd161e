from __future__ import annotations

from torch import Tensor, nn

from models.from_scratch.pieces import LENGTH, SOURCE, TARGET, Attention, D, causal, table


class Ported(nn.Module):
    """Names of a port from another framework; the table of positions is a plain attribute."""

    class Layer(nn.Module):
        def __init__(self, *attentions: str) -> None:
            super().__init__()
            self.attentions = attentions
            for name in attentions:
                self.add_module(name, Attention("wq", "wk", "wv", "dense"))
            self.ffn = nn.Sequential(nn.Linear(D, 50), nn.ReLU(), nn.Linear(50, D))
            for i in range(1 + len(attentions)):
                self.add_module(f"layernorm{i + 1}", nn.LayerNorm(D, eps=1e-6))

        def forward(self, x: Tensor, *seen: tuple[Tensor | None, Tensor]) -> Tensor:
            for i, (name, (memory, keep)) in enumerate(zip(self.attentions, seen, strict=True)):
                y = getattr(self, name)(x, x if memory is None else memory, keep)
                x = getattr(self, f"layernorm{i + 1}")(x + y)
            return getattr(self, f"layernorm{len(seen) + 1}")(x + self.ffn(x))

    class Side(nn.Module):
        def __init__(self, vocab: int, layers: str, *attentions: str) -> None:
            super().__init__()
            self.embedding, self.pos_encoding = nn.Embedding(vocab, D), table(LENGTH, D)[None]
            self.add_module(layers, nn.ModuleList(Ported.Layer(*attentions) for _ in range(2)))

        def embed(self, ids: Tensor) -> Tensor:
            return self.embedding(ids) * D**0.5 + self.pos_encoding[:, : ids.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Side(SOURCE, "enc_layers", "mha")
        self.decoder = self.Side(TARGET, "dec_layers", "mha1", "mha2")
        self.final_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.enc_layers:
            memory = layer(memory, (None, keep))
        x = self.decoder.embed(target)
        for layer in self.decoder.dec_layers:
            x = layer(x, (None, causal(target)), (memory, keep))
        return self.final_layer(x)
