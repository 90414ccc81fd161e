from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import SOURCE, TARGET, causal, merge, softmax_attention, split


@dataclass(frozen=True)
class Args:
    """Options, as authors of one model for many experiments have them."""

    dim: int = 32
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 4
    layers: int = 2
    positions: str = "rotary"
    scaling: str = "none"
    interleaved: bool = False
    is_cross_turned: bool = False  # cross-attention is rotated too
    norm: str = "rms"  # or "layer", with a bias
    sandwich: bool = False
    parallel: str = ""  # "shared" norm, or norms of its "own"
    tied: bool = False


def frequencies(args: Args) -> Tensor:
    dim = args.dim // args.heads
    found = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
    if args.scaling == "linear":
        return found / 4
    if args.scaling == "llama3":
        waves, low, high, original = 2 * math.pi / found, 1.0, 4.0, 8192
        smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * found / 8 + smooth * found
    return found


def rotated(x: Tensor, frequency: Tensor, *, interleaved: bool) -> Tensor:
    angle = torch.arange(x.shape[2]).to(x.dtype)[:, None] * frequency.to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def norm(args: Args) -> nn.Module:
    return nn.RMSNorm(args.dim, eps=1e-6) if args.norm == "rms" else nn.LayerNorm(args.dim)


def slopes(heads: int) -> Tensor:
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))


class Attend(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args, width = args, args.dim // args.heads
        self.wq, self.wo = nn.Linear(args.dim, args.dim, bias=False), nn.Linear(args.dim, args.dim, bias=False)
        self.wk, self.wv = (nn.Linear(args.dim, args.kv_heads * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor, *, is_self: bool = True) -> Tensor:
        args = self.args
        q, k, v = split(self.wq(x), args.heads), split(self.wk(memory), args.kv_heads), self.wv(memory)
        if args.positions == "rotary" and (is_self or args.is_cross_turned):
            q, k = (rotated(one, frequencies(args), interleaved=args.interleaved) for one in (q, k))
        times = args.heads // args.kv_heads
        k, v = k.repeat_interleave(times, 1), split(v, args.kv_heads).repeat_interleave(times, 1)
        if is_self and args.positions == "alibi":
            at = torch.arange(x.shape[1])
            bias = -slopes(args.heads)[:, None, None] * (at - at[:, None]).abs()
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
            return self.wo(merge(scores.masked_fill(~keep, -1e9).softmax(-1) @ v))
        return self.wo(merge(softmax_attention(q, k, v, keep, q.shape[-1] ** -0.5)))


class Gated(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(args.dim, args.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, args: Args, *, cross: bool) -> None:
        super().__init__()
        names = ["attention", *(["cross_attention"] if cross else []), "ffn"]
        self.args, self.names = args, names
        for name in names:
            self.add_module(name, Gated(args) if name == "ffn" else Attend(args))
            if not (args.parallel == "shared" and name == "ffn"):
                self.add_module(f"{name}_norm", norm(args))
            if args.sandwich:
                self.add_module(f"post_{name}_norm", norm(args))

    def forward(self, x: Tensor, keep: Tensor, memory: Tensor, memory_keep: Tensor) -> Tensor:
        if self.args.parallel:
            h = self.attention_norm(x)
            other = h if self.args.parallel == "shared" else self.ffn_norm(x)
            x = x + self.attention(h, h, keep) + self.ffn(other)
            if "cross_attention" in self.names:
                x = x + self.cross_attention(self.cross_attention_norm(x), memory, memory_keep, is_self=False)
            return x
        for name in self.names:
            h, part = self.get_submodule(f"{name}_norm")(x), self.get_submodule(name)
            if name == "attention":
                h = part(h, h, keep)
            else:
                h = part(h) if name == "ffn" else part(h, memory, memory_keep, is_self=False)
            x = x + (self.get_submodule(f"post_{name}_norm")(h) if self.args.sandwich else h)
        return x


class LlamaLike(nn.Module):
    """Layers as in LLaMA for both sides, with options."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        args = Args(**options)  # type: ignore[arg-type]
        self.src_embed = nn.Embedding(TARGET if args.tied else SOURCE, args.dim)
        self.tgt_embed = nn.Embedding(TARGET, args.dim)
        self.encoder = nn.ModuleList(Layer(args, cross=False) for _ in range(args.layers))
        self.decoder = nn.ModuleList(Layer(args, cross=True) for _ in range(args.layers))
        self.encoder_norm, self.decoder_norm = norm(args), norm(args)
        self.output = nn.Linear(args.dim, TARGET, bias=False)
        if args.tied:
            self.output.weight = self.tgt_embed.weight = self.src_embed.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep, memory = keep[:, None, None], self.src_embed(source)
        for layer in self.encoder:
            memory = layer(memory, keep, memory, keep)
        memory, x = self.encoder_norm(memory), self.tgt_embed(target)
        for layer in self.decoder:
            x = layer(x, causal(target), memory, keep)
        return self.output(self.decoder_norm(x))
