"""Checkpoints of unsupported architectures are refused by name; those of supported ones are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.importing.public.test_public import MODELS
from tests.importing.selfmade import SELFMADE
from tfexport.errors import CheckpointError
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect.scope import SUPPORTED, check_names
from tfexport.importing.importer import import_checkpoint

D, VOCAB = 32, 50
RECORDS = Path(__file__).resolve().parents[4] / "shared" / "goldens"
OWN_MODULE = "docs/guides/your-own-module.md"


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 64, **options), 2, enable_nested_tensor=False)


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 64), 2)


def module(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict(parts)


class Block(nn.Module):
    """A layer of nanoGPT."""

    def __init__(self, *, has_mask: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(D, 3 * D), "c_proj": nn.Linear(D, D)})
        if has_mask:
            self.attn.register_buffer("bias", torch.ones(1, 1, 8, 8).tril())
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(D, 4 * D), "c_proj": nn.Linear(4 * D, D)})


class Llama(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{one}_proj": nn.Linear(D, D, bias=False) for one in "qkvo"})
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(*sizes, bias=False) for name, sizes in (("gate_proj", (D, 64)), ("up_proj", (D, 64)))}
        )
        self.mlp["down_proj"] = nn.Linear(64, D, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(D), nn.RMSNorm(D)


def conformer() -> nn.Module:
    layers = encoder()
    for layer in layers.layers:
        layer.depthwise_conv = nn.Conv1d(D, D, 7, groups=D)
        layer.pointwise_conv = nn.Conv1d(D, D, 1)
    return layers


def experts() -> nn.Module:
    layers = encoder()
    for layer in layers.layers:
        layer.experts = nn.ModuleList(nn.Linear(D, 64) for _ in range(3))
        layer.router = nn.Linear(D, 3)
    return layers


def text() -> dict[str, nn.Module]:
    return {"tgt_embed": nn.Embedding(VOCAB, D), "decoder": decoder(), "generator": nn.Linear(D, VOCAB)}


def both() -> dict[str, nn.Module]:
    return {"src_embed": nn.Embedding(VOCAB, D), **text()}


LANGUAGE, FEATURES, CONVOLUTION, EXPERTS = "decoder-only", "source is features", "convolutions", "mixture of experts"
REFUSED: dict[str, tuple[nn.Module, str, str]] = {
    "nanoGPT": (
        module(
            transformer=module(
                wte=nn.Embedding(VOCAB, D),
                h=nn.ModuleList(Block(has_mask=True) for _ in range(2)),
                ln_f=nn.LayerNorm(D),
            ),
            lm_head=nn.Linear(D, VOCAB, bias=False),
        ),
        LANGUAGE,
        "language models",
    ),
    "GPT-2 without its head": (
        module(wte=nn.Embedding(VOCAB, D), h=nn.ModuleList(Block(has_mask=False) for _ in range(2))),
        LANGUAGE,
        "language models",
    ),
    "Llama": (
        module(
            model=module(embed_tokens=nn.Embedding(VOCAB, D), layers=nn.ModuleList(Llama() for _ in range(2))),
            lm_head=nn.Linear(D, VOCAB, bias=False),
        ),
        LANGUAGE,
        "language models",
    ),
    "an encoder layer named decoder": (module(embed=nn.Embedding(VOCAB, D), decoder=encoder()), LANGUAGE, "language"),
    "a convolution reads spectrograms": (
        module(encoder=module(conv1=nn.Conv1d(80, D, 3), conv2=nn.Conv1d(D, D, 3), stack=encoder()), **text()),
        FEATURES,
        "own module",
    ),
    "patches of images": (
        module(patch_embed=nn.Conv2d(3, D, 4, 4), encoder=encoder(), **text()),
        FEATURES,
        "own module",
    ),
    "a linear layer reads features": (
        module(src_proj=nn.Linear(80, D), encoder=encoder(), **text()),
        FEATURES,
        "own module",
    ),
    "Conformer": (module(encoder=conformer(), **both()), CONVOLUTION, OWN_MODULE),
    "convolutions next to the layers": (
        module(encoder=encoder(), convs=nn.ModuleList(nn.Conv1d(D, D, 3) for _ in range(2)), **both()),
        CONVOLUTION,
        OWN_MODULE,
    ),
    "experts": (module(encoder=experts(), **both()), EXPERTS, OWN_MODULE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_architecture_is_named_with_an_alternative(name: str, tmp_path: Path) -> None:
    model, kind, remedy = REFUSED[name]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "model.pt", tmp_path / "out" / "m", ImportConfig(accept_unverified=True))
    assert kind in caught.value.problems[0]
    assert SUPPORTED in caught.value.problems[0]
    assert remedy in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("name", [*SELFMADE, *MODELS])
def test_supported_models_are_not_refused(name: str) -> None:
    check_names(shapes({**SELFMADE, **MODELS}[name]()))


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*[a-z0-9_].safetensors")), ids=lambda path: path.stem)
def test_published_models_are_not_refused(path: Path) -> None:
    with safe_open(path, "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, not a mapping
    if not path.stem.endswith(".golden"):
        check_names(found)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, LANGUAGE),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, LANGUAGE),
        ({"model_type": "cohere_asr", "architectures": ["CohereAsrForSpeechSeq2Seq"], "num_mel_bins": 80}, FEATURES),
        ({"model_type": "switch_transformers", "num_experts": 8}, EXPERTS),
    ],
)
def test_a_directory_is_refused_by_its_config(config: Mapping[str, object], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(encoder().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path, tmp_path / "m")
    assert kind in caught.value.problems[0]
