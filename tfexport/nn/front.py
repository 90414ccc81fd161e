"""Front ends of an encoder, which turn features or an image into vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfexport.nn.config import ConvolutionConfig, FeaturesConfig, ImageConfig, TransformerConfig
from tfexport.nn.layers import ACTIVATIONS
from tfexport.nn.source import length_mask


def front_end(config: TransformerConfig) -> FeatureFrontEnd | PatchEmbedding | None:
    """Create the front end of a model, or return None if it reads token ids."""
    width = config.width("encoder")
    if config.features is not None:
        return FeatureFrontEnd(config.features, width, config.value("encoder", "norm_eps"))
    return PatchEmbedding(config.image, width) if config.image is not None else None


class FeatureFrontEnd(nn.Module):
    """Convolutions along the frames, and a linear map.

    Masked frames are 0 for every convolution, so that a source does not depend on its padding.
    """

    def __init__(self, config: FeaturesConfig, d_model: int, eps: float) -> None:
        super().__init__()
        self.conv2d = config.conv2d
        channels = [1 if config.conv2d else config.dim, *(each.channels for each in config.convolutions)]
        layers = zip(config.convolutions, channels[:-1], strict=True)
        self.layers = nn.ModuleList(_ConvolutionLayer(each, before, eps, config.conv2d) for each, before in layers)
        self.proj = nn.Linear(config.width, d_model) if config.projection else None

    def forward(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors [batch, source_len, d_model] and their mask [batch, source_len].

        `features` are float32 [batch, frames, dim], and `mask` is True for the first frames of each row.
        """
        x = features.to(next(self.parameters()).dtype)
        x, lengths = x[:, None] if self.conv2d else x.transpose(1, 2), mask.sum(1)
        for layer in self.layers:
            x, lengths = layer(x, lengths)
        x = x.transpose(1, 2)
        x = x.flatten(2) if self.conv2d else x
        return x if self.proj is None else self.proj(x), length_mask(lengths, x.shape[1])


class _ConvolutionLayer(nn.Module):
    def __init__(self, config: ConvolutionConfig, channels: int, eps: float, conv2d: bool) -> None:
        super().__init__()
        self.positions, self.activation = config.positions, ACTIVATIONS[config.activation]
        returned = config.channels * (2 if config.activation == "glu" else 1)
        sizes = (channels, returned, config.kernel, config.stride, config.padding)
        self.conv = (nn.Conv2d if conv2d else nn.Conv1d)(*sizes, bias=config.bias)
        self.norm = _GroupNorm(config.channels, eps) if config.group_norm else None

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Map `x` [batch, channels, frames, …], of which `lengths` [batch] are frames."""
        x, lengths = self.activation(_convolved(self.conv, _masked(x, lengths))), self.positions(lengths)
        return x if self.norm is None else self.norm(x, lengths), lengths


class _GroupNorm(nn.Module):
    """A norm over all channels and frames of a source, without masked frames."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        wide, axes = x.to(torch.promote_types(x.dtype, torch.float32)), tuple(range(1, x.dim()))
        count = (lengths * (x.shape[1] * x.shape[3:].numel())).to(wide.dtype).reshape(-1, *[1] * len(axes))
        centered = wide - _masked(wide, lengths).sum(axes, keepdim=True) / count
        variance = _masked(centered, lengths).square().sum(axes, keepdim=True) / count
        scaled = (centered * torch.rsqrt(variance + self.eps)).to(x.dtype)
        shape = (-1, *[1] * (x.dim() - 2))
        return scaled * self.weight.view(shape) + self.bias.view(shape)


def _convolved(conv: nn.Module, x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return conv(x)  # type: ignore[no-any-return]
    # ONNX has no convolution of bfloat16 before opset 22.
    wide = {name: parameter.float() for name, parameter in conv.named_parameters()}
    return torch.func.functional_call(conv, wide, x.float()).to(x.dtype)  # type: ignore[no-any-return]


def _masked(x: Tensor, lengths: Tensor) -> Tensor:
    keep = length_mask(lengths, x.shape[2])
    return x.masked_fill(~keep.reshape(keep.shape[0], 1, -1, *[1] * (x.dim() - 3)), 0)


class PatchEmbedding(nn.Module):
    """A linear map of the patches of an image, after the class tokens."""

    def __init__(self, config: ImageConfig, d_model: int) -> None:
        super().__init__()
        patch = config.patch_height, config.patch_width
        self.conv = nn.Conv2d(config.channels, d_model, patch, patch)
        self.tokens = nn.Parameter(torch.zeros(config.class_tokens, d_model)) if config.class_tokens else None

    def forward(self, pixels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors [batch, source_len, d_model] and `mask` [batch, source_len].

        `pixels` are float32 [batch, channels, height, width].
        """
        x = _convolved(self.conv, pixels.to(self.conv.weight.dtype)).flatten(2).transpose(1, 2)
        return x if self.tokens is None else torch.cat((self.tokens.expand(x.shape[0], -1, -1), x), 1), mask
