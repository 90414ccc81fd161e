"""Models that hear frames through convolutions, or see an image in patches, as people write them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.contract import AlignmentHeads, ModelSpec, TokenIds
from tfexport.importing.own_module import OwnModule
from tfexport.nn.cache import Cache, Cross, KeyValue, Source
from tfexport.sources import Convolution, FeatureSource, ImageSource

VOCAB, D, HEADS, LAYERS, LENGTH = 40, 64, 4, 2, 12
DIM, FRAMES = 6, 4 * LENGTH  # the most frames of LENGTH positions
WIDTH = D // HEADS
SHORTER = (Convolution(kernel=3, stride=2, padding=1),) * 2
ALIGNMENT = AlignmentHeads(layer=1, heads=(1, 2))
KINDS = {
    "features": FeatureSource(dim=DIM, convolutions=SHORTER),
    "fixed": FeatureSource(dim=DIM, convolutions=SHORTER, frames=30),
    "image": ImageSource(channels=3, height=6, width=8, positions=12),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in "qkvo")

    def parts(self, x: Tensor, memory: Tensor) -> list[Tensor]:
        """Return query, key and value, [rows, len, heads, width]."""
        return [part(y).unflatten(-1, (HEADS, WIDTH)) for part, y in ((self.q, x), (self.k, memory), (self.v, memory))]

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """As in training: no cache, all tokens at once; causal without a mask."""
        parts = (part.transpose(1, 2) for part in self.parts(x, memory))
        found = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
        return self.o(found.transpose(1, 2).flatten(2))

    def cached(self, x: Tensor, cache: Cache | Source, layer: int) -> Tensor:
        found = cache.attend(layer, *(part.flatten(0, 1) for part in self.parts(x, x)), scale=WIDTH**-0.5)
        return self.o(found.unflatten(0, x.shape[:2]))


class Senses(nn.Module):
    def __init__(self, *, sees: bool) -> None:
        super().__init__()
        shapes = [(3, D, 2, 2)] if sees else [(DIM, D, 3, 2, 1), (D, D, 3, 2, 1)]
        self.convolutions = nn.ModuleList((nn.Conv2d if sees else nn.Conv1d)(*shape) for shape in shapes)
        self.sees, self.places, self.hear = sees, nn.Embedding(LENGTH, D), Attention()
        self.tokens, self.steps, self.out = nn.Embedding(VOCAB, D), nn.Embedding(16, D), nn.Linear(D, VOCAB)
        self.own, self.look = (nn.ModuleList(Attention() for _ in range(LAYERS)) for _ in "ol")

    def front(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors [batch, positions, D] and their mask."""
        x = x.to(self.places.weight.dtype)  # features are float32 in every precision
        for convolution in self.convolutions:
            if self.sees:
                x = convolution(x).flatten(2).mT
            else:
                x = F.gelu(convolution((x * mask[..., None]).mT)).mT
                mask = torch.arange(x.shape[1]) < ((mask.sum(1) - 1) // 2 + 1)[:, None]
        return x + self.places(torch.arange(x.shape[1])), mask

    def states(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the encoder's output."""
        x, mask = self.front(x, mask)
        return x + self.hear(x, x, mask[:, None, None])

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """As in training."""
        memory, mask = self.states(x, mask), self.front(x, mask)[1]
        y = self.tokens(target) + self.steps.weight[: target.shape[1]]
        for own, look in zip(self.own, self.look, strict=True):
            y = y + own(y, y, None)
            y = y + look(y, memory, mask[:, None, None])
        return self.out(y)

    # ---- what the export asks for

    def encode(self, x: Tensor, source: Source) -> list[KeyValue]:
        x, mask = self.front(x, source.mask)
        memory = x + self.hear.cached(x, source.with_mask(mask), 0)
        parts = (look.parts(memory, memory)[1:] for look in self.look)
        return [KeyValue(*(part.transpose(1, 2) for part in pair)) for pair in parts]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        y = self.tokens(target_ids) + self.steps(cache.positions)
        for i, (own, look) in enumerate(zip(self.own, self.look, strict=True)):
            y = y + own.cached(y, cache, i)
            found = cross.attend(i, look.parts(y, y)[0].flatten(0, 1), scale=WIDTH**-0.5)
            y = y + look.o(found.unflatten(0, y.shape[:2]))
        return self.out(y[:, -1]).float()


def make(kind: str = "features") -> OwnModule:
    """Stand in for `load_state_dict`: weights that say something else for every source."""
    torch.manual_seed(0)
    model = Senses(sees=kind == "image")
    for name, parameter in model.named_parameters():
        parameter.data *= 2 if name.startswith(("look", "conv")) else 1
    spec = ModelSpec(
        d_model=D,
        max_source_length=LENGTH,
        tokens=TokenIds(pad=0, start=1, eos=2),
        precision="fp32",
        vocab=VOCAB,
        layers=LAYERS,
        heads=HEADS,
        head_dim=WIDTH,
        value_dim=WIDTH,
        max_target_length=16,
        **{"image" if kind == "image" else "features": KINDS[kind]},
    )
    return OwnModule(model, spec)


def states() -> OwnModule:
    """Only the encoder, whose states are the author's."""
    own = make()
    own.module.hidden_states = own.module.states
    sizes = dict.fromkeys(("vocab", "layers", "heads", "head_dim", "value_dim", "max_target_length"), 0)
    return OwnModule(own.module, replace(own.spec, **sizes))


OWN = {**{kind: partial(make, kind) for kind in KINDS}, "states": states}
