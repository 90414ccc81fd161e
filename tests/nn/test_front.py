"""Encoders of features and images: PyTorch's own layers, padding, other lengths in one graph, and configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import tiny
from tfexport.contract import AlignmentHeads
from tfexport.errors import ConfigError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.cache import Cross, Source
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig, ImageConfig, TransformerConfig, model_spec
from tfexport.nn.directory import save_model
from tfexport.nn.eager import align
from tfexport.nn.source import encoder_inputs, position_mask
from tfexport.nn.transformer import Transformer
from tfexport.sources import FeatureSource, ImageSource

TOLERANCE = 1e-12
Weights = Mapping[str, Tensor]


def convolution(channels: int, kernel: int, stride: int, **more: Any) -> ConvolutionConfig:
    return ConvolutionConfig(channels=channels, kernel=kernel, stride=stride, **more)


def model_of(**front: Any) -> TransformerConfig:
    return tiny.config(source_vocab=0, max_source_length=64, embedding_scale=3.0, **front)


LINEAR = FeaturesConfig(dim=6)
GATED = FeaturesConfig(
    dim=6,
    convolutions=(convolution(10, 5, 2, padding=2, activation="glu"), convolution(32, 3, 1, activation="glu")),
    projection=False,
)
WAVEFORM = FeaturesConfig(
    dim=1,
    convolutions=(
        convolution(8, 7, 4, bias=False, activation="tanh", group_norm=True),
        convolution(12, 3, 2, padding=1, activation="gelu"),
    ),
)
PLANE = FeaturesConfig(
    dim=9,
    conv2d=True,
    convolutions=(convolution(4, 3, 2, activation="relu", group_norm=True), convolution(5, 3, 1, padding=1)),
)
IMAGE = ImageConfig(channels=3, height=8, width=11, patch_height=4, patch_width=2, class_tokens=2)


def linear(w: Weights, x: Tensor) -> Tensor:
    return F.linear(x, w["proj.weight"], w["proj.bias"])


def gated(w: Weights, x: Tensor) -> Tensor:
    x = F.glu(F.conv1d(x.T, w["layers.0.conv.weight"], w["layers.0.conv.bias"], stride=2, padding=2), 0)
    return F.glu(F.conv1d(x, w["layers.1.conv.weight"], w["layers.1.conv.bias"]), 0).T


def waveform(w: Weights, x: Tensor) -> Tensor:
    x = torch.tanh(F.conv1d(x.T[None], w["layers.0.conv.weight"], stride=4))
    x = F.group_norm(x, 1, w["layers.0.norm.weight"], w["layers.0.norm.bias"])
    x = F.gelu(F.conv1d(x, w["layers.1.conv.weight"], w["layers.1.conv.bias"], stride=2, padding=1))
    return linear(w, x[0].T)


def plane(w: Weights, x: Tensor) -> Tensor:
    x = F.relu(F.conv2d(x[None, None], w["layers.0.conv.weight"], w["layers.0.conv.bias"], stride=2))
    x = F.group_norm(x, 1, w["layers.0.norm.weight"], w["layers.0.norm.bias"])
    x = F.conv2d(x, w["layers.1.conv.weight"], w["layers.1.conv.bias"], padding=1)
    return linear(w, torch.cat([frame.flatten()[None] for frame in x[0].unbind(1)]))


def patches(w: Weights, x: Tensor) -> Tensor:
    cut = [x[:, row : row + 4, column : column + 2].flatten() for row in (0, 4) for column in (0, 2, 4, 6, 8)]
    return torch.cat((w["tokens"], F.linear(torch.stack(cut), w["conv.weight"].flatten(1), w["conv.bias"])))


# A configuration, PyTorch's own layers for one source, and the positions of 31 frames.
FRONTS: dict[str, tuple[TransformerConfig, Callable[[Weights, Tensor], Tensor], int]] = {
    "linear": (model_of(features=LINEAR), linear, 31),
    "gated": (model_of(features=GATED), gated, 14),
    "waveform": (model_of(features=WAVEFORM, positions="rotary", rotary_cross=True), waveform, 4),
    "plane": (model_of(features=PLANE, relative_bias="alibi"), plane, 15),
    "image": (model_of(image=IMAGE), patches, 12),
}
EVERY = pytest.mark.parametrize("name", FRONTS)


def sources(config: TransformerConfig, lengths: tuple[int, ...] = (31, 12, 22), seed: int = 0) -> list[Tensor]:
    """Return the inputs of the encoder graph; padding is not 0."""
    generator, kind = torch.Generator().manual_seed(seed), model_spec(config, "fp32").source
    if isinstance(kind, ImageSource):
        return [torch.randn(len(lengths), *kind.shape, generator=generator)]
    assert isinstance(kind, FeatureSource)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return [torch.randn(*mask.shape, kind.dim, generator=generator), mask]


@EVERY
@torch.no_grad()
def test_states_equal_those_of_the_same_vectors_as_token_embeddings(name: str) -> None:
    """In a padded batch, from PyTorch's own layers on each source alone."""
    config, front, positions = FRONTS[name]
    model, inputs, kind = tiny.model(config), sources(config), model_spec(config, "fp32").source
    x, mask = encoder_inputs(kind, inputs)
    keep, states = position_mask(kind, mask), model.hidden_states(x, mask)
    assert keep.shape == states.shape[:2] == (3, positions)
    weights = {key.removeprefix("enc.front."): value for key, value in model.state_dict().items() if "front" in key}
    for row, source in enumerate(x.double()):
        vectors = front(weights, source[mask[row]] if len(inputs) == 2 else source)
        tokens = tiny.model(replace(config, features=None, image=None, source_vocab=len(vectors) + 3))
        tokens.load_state_dict(
            {key: value for key, value in model.state_dict().items() if "front" not in key}, strict=False
        )
        tokens.enc.embed.weight[: len(vectors)] = vectors
        alone = torch.arange(len(vectors))[None]
        expected = tokens.hidden_states(alone, torch.ones_like(alone, dtype=torch.bool))
        assert int(keep[row].sum()) == len(vectors)
        assert (states[row, keep[row]] - expected[0]).abs().max() < TOLERANCE * expected.abs().max()


@EVERY
@torch.no_grad()
def test_a_source_decodes_the_same_alone_and_in_a_batch(name: str) -> None:
    config = FRONTS[name][0]
    model, kind, target_ids = tiny.model(config), model_spec(config, "fp32").source, tiny.batch().target_ids
    x, mask = encoder_inputs(kind, sources(config))
    together, keep = model(x, mask, target_ids), position_mask(kind, mask)
    stepped = model.decode_step(target_ids, Cross(model.encode(x, Source(mask)), keep), model.empty_cache(target_ids))
    assert (stepped - together[:, -1]).abs().max() < TOLERANCE * together.abs().max()
    weights = align(
        model, AlignmentHeads(layer=1, heads=(0, 2)), model_spec(config, "fp32"), sources(config), target_ids
    )
    assert weights.shape == (*target_ids.shape, keep.shape[1])
    assert not weights.masked_select(~keep[:, None]).any()
    for row in range(3):
        inputs = (
            [x[row : row + 1, mask[row]], mask[row : row + 1, mask[row]]] if config.features else [x[row : row + 1]]
        )
        alone = model(*encoder_inputs(kind, inputs), target_ids[row : row + 1])
        assert (alone[0] - together[row]).abs().max() < TOLERANCE * together.abs().max()


class Encode(nn.Module):
    """The encoder of a model, of the inputs of its graph."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.kind = model, model_spec(model.config, "fp32").source

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = encoder_inputs(self.kind, inputs)
        last = self.model.encode(x, Source(mask))[-1]
        return last.key, last.value


@pytest.mark.filterwarnings("ignore")  # of PyTorch about itself
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip(FRONTS, (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float16), strict=True)),
)
@torch.no_grad()
def test_one_program_encodes_batches_of_every_length(name: str, dtype: torch.dtype) -> None:
    config = FRONTS[name][0]
    encode = Encode(tiny.model(config, dtype=dtype))
    sizes = [dict.fromkeys(range(1 if config.image else 2), torch.export.Dim.DYNAMIC) for _ in sources(config)]
    program = torch.export.export(encode, (sources(config),), dynamic_shapes=(sizes,), strict=False)
    # PyTorch's guards, which graphs lack, exclude a batch of one source.
    traced = program.module(check_guards=False)
    for lengths in ((31, 12, 22), (57, 60), (19,)):
        inputs = sources(config, lengths, seed=1)
        for found, expected in zip(traced(inputs), encode(inputs), strict=True):
            assert found.dtype == expected.dtype == dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gated", pytest.param("image", marks=pytest.mark.slow)])
def test_bfloat16_needs_no_operator_that_onnx_lacks(name: str, tmp_path: Path) -> None:
    save_model(tiny.model(FRONTS[name][0], dtype=torch.float32), tmp_path / "model")
    config = ExportConfig(precision="bf16", variants=("concat",))
    bundle = export_bundle(str(tmp_path / "model"), tmp_path / "bundle", config, verify=False)
    assert model_spec(FRONTS[name][0], "bf16") == bundle.manifest.spec


@torch.no_grad()
def test_a_head_reads_the_states_of_an_image() -> None:
    alone: dict[str, Any] = {"decoder": None, "target_vocab": None, "max_target_length": None, "pooling": "cls"}
    config = replace(model_of(image=IMAGE), head="sequence", labels=("a", "b"), **alone)
    model = tiny.model(config)
    x, mask = encoder_inputs(model_spec(config, "fp32").source, sources(config))
    states = model.hidden_states(x, mask)
    assert torch.equal(model.classify(states, mask), F.linear(states[:, 0], model.head.weight, model.head.bias))  # type: ignore[union-attr]


@EVERY
def test_a_configuration_is_stored_and_gives_the_specification(name: str) -> None:
    config = FRONTS[name][0]
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    spec = model_spec(config, "fp32")
    assert type(spec).from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.source.fits(60) == (12 if config.image else 60)


def test_every_frame_of_a_fixed_number_is_a_source() -> None:
    fixed = replace(GATED, frames=31)
    assert model_spec(model_of(features=fixed), "fp32").source.sizes(64) == {"frames": 31}
    with pytest.raises(ConfigError, match="every source has 14 positions"):
        replace(model_of(features=fixed), max_source_length=13)
    with pytest.raises(ConfigError, match="every source has 12 positions"):
        tiny.model(model_of(image=IMAGE)).shorten(11, None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"source_vocab": 31}, "source_vocab, features and image: 2 of them are given, expected one"),
        ({"features": None}, "source_vocab, features and image: 0 of them are given, expected one"),
        ({"features": replace(LINEAR, projection=False)}, "features have width 6, expected d_model 32"),
        ({"features": replace(GATED, convolutions=GATED.convolutions[:1])}, "features have width 10, expected d_model"),
        ({"tie_embeddings": True}, "tie_embeddings needs equal vocabularies, got source_vocab 0"),
        (
            {"encoder": replace(tiny.config().encoder, d_model=30)},
            "encoder.num_heads is 4, which does not divide d_mod",
        ),
        ({"decoder": replace(tiny.config().encoder, d_model=48)}, "decoder.d_model is given; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(model_of(features=LINEAR), **change)


def test_parts_without_a_result_are_refused() -> None:
    with pytest.raises(ConfigError, match="dim is 2, of which the convolutions leave nothing"):
        replace(PLANE, dim=2)
    with pytest.raises(ConfigError, match="patches are 9 x 2, which do not fit into an image of 8 x 11"):
        replace(IMAGE, patch_height=9)
    with pytest.raises(ConfigError, match="tie_embeddings needs equal widths, got 16 and d_model 32"):
        tiny.config(encoder={"d_model": 16}, tie_embeddings=True)


# ---- settings that a side replaces

OWN: dict[str, Any] = {
    "embedding_scale": 1.5,
    "embedding_norm": True,
    "norm_eps": 1e-2,
    "activation": "gelu",
    "feed_forward": "glu",
}


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_a_side_replaces_a_setting_of_the_model(name: str) -> None:
    own, base, batch = {name: OWN[name]}, tiny.config(), tiny.batch()
    one, other = tiny.config(encoder=own), tiny.config(decoder=own)
    states = [tiny.model(each).hidden_states(*batch[:2]) for each in (base, one, other, tiny.config(**own))]
    assert torch.equal(states[0], states[2])
    assert torch.equal(states[1], states[3])
    assert not torch.allclose(states[0], states[1], rtol=1e-6)
    both = tiny.model(tiny.config(encoder=own, decoder=own))(*batch)
    assert torch.equal(both, tiny.model(tiny.config(**own))(*batch))
    assert not torch.allclose(both, tiny.model(one)(*batch), rtol=1e-6)
