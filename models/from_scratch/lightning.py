from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D


class Lightning(nn.Module):
    """A task around a net of nn.Transformer and tables in an nn.ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"src": nn.Embedding(SOURCE, D, 0), "tgt": nn.Embedding(TARGET, D, 0), "pos": nn.Embedding(LENGTH, D)}
        body = nn.Transformer(D, HEADS, 2, 2, 40, 0.1, "gelu", batch_first=True)
        body.encoder.use_nested_tensor = False  # PyTorch warns about them
        self.model = nn.ModuleDict({"embeddings": nn.ModuleDict(parts), "body": body, "head": nn.Linear(D, TARGET)})
        self.loss = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def embed(self, side: str, ids: Tensor) -> Tensor:
        parts = self.model["embeddings"]
        return parts[side](ids) * D**0.5 + parts["pos"](torch.arange(ids.shape[1]))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        masks = {"tgt_mask": later, "src_key_padding_mask": ~keep, "memory_key_padding_mask": ~keep}
        return self.model["head"](self.model["body"](self.embed("src", source), self.embed("tgt", target), **masks))
