"""Rotary positions, two key heads for four query heads, RMSNorm, SwiGLU: what people write from scratch today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.contract import ModelSpec, TokenIds
from tfexport.importing.own_module import OwnModule
from tfexport.importing.reference.texts import RecordedTexts
from tfexport.importing.text import Tokenizers
from tfexport.nn.cache import Cache, Cross, KeyValue, Source

WORDS = Path(__file__).with_name("words.json")
VOCAB, D, HEADS, KV_HEADS, LAYERS, LENGTH = 48, 64, 4, 2, 2, 32
WIDTH = D // HEADS
PAD, START, END = 0, 1, 2


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn halves of [rows, len, heads, width] by an angle that grows with the position."""
    angle = positions[:, :, None, None].float() * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat((part, part), -1).to(x.dtype) for part in (angle.cos(), angle.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((D, 64), (D, 64), (64, D)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.wk, self.wv = (nn.Linear(D, KV_HEADS * WIDTH, bias=False) for _ in "kv")

    def query(self, x: Tensor) -> Tensor:
        return self.wq(x).unflatten(-1, (HEADS, WIDTH))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return [rows, len, key heads, width] of both."""
        return tuple(part(x).unflatten(-1, (KV_HEADS, WIDTH)) for part in (self.wk, self.wv))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, *, turned: bool) -> Tensor:
        """As in training: no cache, all tokens at once."""
        query, (key, value) = self.query(x), self.key_value(memory)
        if turned:
            query, key = (rotate(part, torch.arange(part.shape[1])[None]) for part in (query, key))
        parts = (part.transpose(1, 2) for part in (query, key, value))
        found = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        return self.wo(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, *, decoder: bool) -> None:
        super().__init__()
        self.attention, self.network, self.norms = Attention(), SwiGLU(), nn.ModuleList(Norm() for _ in range(3))
        self.look = Attention() if decoder else None


class Modern(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList([Layer(decoder=False)])
        self.decoder = nn.ModuleList(Layer(decoder=True) for _ in range(LAYERS))
        self.norm, self.encoder_norm = Norm(), Norm()

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """As in training; `keep` True = token."""
        memory, mask = self.tokens(source), keep[:, None, None]
        for layer in self.encoder:
            y = layer.norms[0](memory)
            memory = memory + layer.attention(y, y, mask, turned=True)
            memory = memory + layer.network(layer.norms[1](memory))
        memory, x = self.encoder_norm(memory), self.tokens(target)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        for layer in self.decoder:
            y = layer.norms[0](x)
            x = x + layer.attention(y, y, causal, turned=True)
            x = x + layer.look(layer.norms[1](x), memory, mask, turned=False)
            x = x + layer.network(layer.norms[2](x))
        return self.norm(x) @ self.tokens.weight.T

    # ---- what the export asks for

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        x, positions = self.tokens(source_ids), torch.arange(source_ids.shape[1])[None]
        for i, layer in enumerate(self.encoder):
            x = x + self.attend(layer.attention, layer.norms[0](x), source, i, positions)
            x = x + layer.network(layer.norms[1](x))
        x = self.encoder_norm(x)
        return [KeyValue(*(part.transpose(1, 2) for part in layer.look.key_value(x))) for layer in self.decoder]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        x = self.tokens(target_ids)
        for i, layer in enumerate(self.decoder):
            x = x + self.attend(layer.attention, layer.norms[0](x), cache, i, cache.positions)
            found = cross.attend(i, layer.look.query(layer.norms[1](x)).flatten(0, 1), scale=WIDTH**-0.5)
            x = x + layer.look.wo(found.unflatten(0, target_ids.shape))
            x = x + layer.network(layer.norms[2](x))
        return (self.norm(x[:, -1]) @ self.tokens.weight.T).float()

    def attend(self, attention: Attention, x: Tensor, cache: Cache | Source, layer: int, positions: Tensor) -> Tensor:
        query, (key, value) = attention.query(x), attention.key_value(x)
        parts = (part.flatten(0, 1) for part in (rotate(query, positions), rotate(key, positions), value))
        return attention.wo(cache.attend(layer, *parts, scale=WIDTH**-0.5).unflatten(0, x.shape[:2]))


SPEC = ModelSpec(
    d_model=D,
    source_vocab=VOCAB,
    max_source_length=LENGTH,
    tokens=TokenIds(pad=PAD, start=START, eos=END, unk=3),
    precision="fp32",
    vocab=VOCAB,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=WIDTH,
    value_dim=WIDTH,
    max_target_length=LENGTH,
)


def module(seed: int = 0, gain: float = 0.25) -> Modern:
    """Stand in for `load_state_dict`: weights that say something else for every source."""
    torch.manual_seed(seed)
    made = Modern()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(gain * torch.randn_like(parameter) if parameter.dim() > 1 else parameter)
    return made


def texts() -> RecordedTexts:
    words = Tokenizer.from_file(str(WORDS))
    return RecordedTexts(
        samples=["w7 w8 w9", "w5", "W12 w30 w31 w32 w33", "w6 nobody knows"],
        to_ids=lambda text: [*words.encode(text.lower()).ids, END],
        to_text=words.decode,
        start=START,
        end=END,
        max_new_tokens=12,
    )


def greedy(model: Callable[..., Tensor], source_ids: list[int], longest: int) -> list[int]:
    """Decode as the author does, without a cache; the end token is left out."""
    found, ids = [START], torch.tensor([source_ids])
    while len(found) <= longest:
        token = int(model(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([found]))[0, -1].argmax())
        if token == END:
            break
        found.append(token)
    return found


def make() -> OwnModule:
    """What the command line is given: tests.stranger.modern:make."""
    return OwnModule(module(), SPEC, tokenizers=Tokenizers(str(WORDS)), texts=texts(), generate=greedy)


def steady() -> OwnModule:
    """Weights so small that a few bits fewer change little."""
    return OwnModule(module(gain=0.08), SPEC, tokenizers=Tokenizers(WORDS), texts=texts())


def other_weights() -> OwnModule:
    return OwnModule(module(seed=1), SPEC)


def wrong_loop() -> OwnModule:
    """A loop that turns the source around."""
    return OwnModule(module(), SPEC, generate=lambda model, ids, longest: greedy(model, ids[::-1], longest))


def wrong_reference() -> OwnModule:
    """The right weights beside a forward that sees one source token less."""
    return OwnModule(module(), SPEC, lambda model, source, keep, target: model(source[:, 1:], keep[:, 1:], target))


def shorter_spec() -> OwnModule:
    return OwnModule(module(), replace(SPEC, max_target_length=8, d_model=16))


def fails() -> OwnModule:
    """A checkpoint that is not there."""
    return OwnModule(torch.load("build/nothing.pt"), SPEC)


def returns_a_module() -> nn.Module:
    return module()


def everything_wrong() -> OwnModule:
    return OwnModule(nn.Linear(2, 2).half(), replace(SPEC, precision="fp16"), texts=texts())
