from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import TARGET, Attention, D, causal


class OneForBoth(nn.Module):
    """Both sides share embedding, positions and the norms before and after the stack; named after their sublayers."""

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            self.self_attn = Attention(*names)
            if cross:
                self.cross_attn = Attention(*names)
            self.up_proj, self.down_proj = nn.Linear(D, 40), nn.Linear(40, D)
            self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(D), nn.LayerNorm(D)
            if cross:
                self.post_cross_attention_layernorm = nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.token_table, self.places = nn.Embedding(TARGET, D), nn.Embedding(TARGET + 9, D)
        self.embed_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.enc_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.dec_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_norm(self.token_table(ids) + self.places.weight[: ids.shape[1]])

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory, x = self.embed(source), self.embed(target)
        for layer in self.enc_layers:
            y = layer.input_layernorm(memory)
            memory = memory + layer.self_attn(y, y, keep)
            memory = memory + layer.down_proj(F.gelu(layer.up_proj(layer.post_attention_layernorm(memory))))
        memory = self.norm(memory)
        for layer in self.dec_layers:
            y = layer.input_layernorm(x)
            x = x + layer.self_attn(y, y, causal(target))
            x = x + layer.cross_attn(layer.post_attention_layernorm(x), memory, keep)
            x = x + layer.down_proj(F.gelu(layer.up_proj(layer.post_cross_attention_layernorm(x))))
        return self.norm(x) @ self.token_table.weight.T
