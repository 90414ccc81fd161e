"""A list that holds the layers of both sides is cut where the layers change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.from_scratch.parts import LENGTH, SOURCE, TARGET, D, Tree, attend, causal
from tests.importing.detect.test_match import check, recorded
from tfexport.errors import CheckpointError
from tfexport.importing.detect._draft import drafts
from tfexport.importing.detect.search import Budget, detect


class OneList(nn.Module):
    """One list with the layers of the encoder, followed by those of the decoder."""

    def __init__(self, encoder: int = 2, decoder: int = 3) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(qkv=nn.Linear(D, 3 * D, bias=False), proj=nn.Linear(D, D))

        def across() -> Tree:
            return Tree(query=nn.Linear(D, D), key=nn.Linear(D, D), value=nn.Linear(D, D), proj=nn.Linear(D, D))

        def layer(*, is_decoder: bool) -> Tree:
            parts = {"norm_a": nn.LayerNorm(D), "attn": attention(), "norm_b": nn.LayerNorm(D)}
            if is_decoder:
                parts |= {"cross": across(), "norm_c": nn.LayerNorm(D)}
            return Tree(**parts, mlp=nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D)))

        self.cut = encoder
        self.src, self.tgt = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, D))
        self.layers = nn.ModuleList(layer(is_decoder=i >= encoder) for i in range(encoder + decoder))
        self.head = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def run(x: Tensor, memory: Tensor | None, seen: Tensor, layers: nn.ModuleList) -> Tensor:
            for layer in layers:
                parts: Tree = layer  # type: ignore[assignment]  # a list says no more than modules
                q, k, v = parts.attn.qkv(parts.norm_a(x)).chunk(3, -1)
                x = x + parts.attn.proj(attend(q, k, v, seen))
                if memory is not None:
                    y = parts.norm_b(x)
                    maps = parts.cross
                    y = attend(maps.query(y), maps.key(memory), maps.value(memory), keep[:, None])
                    x = x + maps.proj(y)
                last = parts.norm_b if memory is None else parts.norm_c
                x = x + parts.mlp(last(x))
            return x

        memory = run(
            self.src(source) + self.positions[:, : source.shape[1]], None, keep[:, None], self.layers[: self.cut]
        )
        x = self.tgt(target) + self.positions[:, : target.shape[1]]
        return self.head(run(x, memory, causal(target), self.layers[self.cut :]))


def test_a_list_of_both_sides_is_cut(tmp_path: Path) -> None:
    reference = recorded(OneList, tmp_path / "g", source_vocab=SOURCE, target_vocab=TARGET)
    layout, canonical = check(reference, detect(reference.state, reference, [], budget=Budget(2_000)), within=1e-13)
    assert any(line.startswith("layers.{0,1}.attn.qkv.weight -> enc.layers.{0,1}.self.[q/k/v]") for line in layout.map)
    assert any(line.startswith("layers.{i+2}.attn.qkv.weight -> dec.layers.{i}.self.[q/k/v]") for line in layout.map)
    config = canonical.config
    assert (config.encoder.layers, config.decoder and config.decoder.layers) == (2, 3)


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 3), (3, 1)])
def test_a_layer_before_or_after_the_others_is_no_side(encoder: int, decoder: int) -> None:
    """A single element may be anything: a stem, a head, a whole encoder."""
    with pytest.raises(CheckpointError, match="no list of equal layers"):
        next(drafts(OneList(encoder, decoder).state_dict()))
