"""Random Whisper, Speech2Text, Moonshine and VisionEncoderDecoder models equal canonical ones in float64."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    DeiTConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests import tiny
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig, ImageConfig, TransformerConfig, model_spec
from tfexport.nn.source import encoder_inputs
from tfexport.nn.transformer import Transformer

LENGTH = 24
PRE: dict[str, Any] = {"norm_place": "pre", "final_norm": True}
SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": tiny.VOCAB,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
ViT: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "image_size": (12, 20), "patch_size": (4, 5), "num_channels": 3,
}  # fmt: skip
NAMES: list[tuple[str, Any]] = [
    (r"^(model\.|decoder\.(?=model|output))", ""),
    (r"^model\.", ""),
    (r"^encoder\.", "enc."),
    (r"^decoder\.", "dec."),
    (r"(self_attn|attention)\.([qkvo])(ut)?_proj", r"self.\2"),
    (r"encoder_attn\.([qkvo])(ut)?_proj", r"cross.\1"),
    (r"mlp\.", ""),
    (r"\.fc(\d)", r".ffn.fc\1"),
    (r"\.(self_attn_layer_norm|input_layernorm|layernorm_before)\.", ".norm1."),
    (r"\.(encoder_attn_layer_norm|post_attention_layernorm|layernorm_after)\.", ".norm2."),
    (r"^enc(.*)\.final_layer_norm\.", r"enc\1.norm2."),
    (r"\.final_layer_?norm\.", ".norm3."),
    (r"\.(layer_norm|layernorm)\.", ".norm."),
    (r"\.layernorm_embedding\.", ".emb_norm."),
    (r"\.embed_tokens\.", ".embed."),
    (r"\.embed_positions\.weight$", ".pos"),
    (r"^(proj_out|lm_head|output_projection)\.", "out."),
    (r"\.conv(\d)\.", lambda found: f".front.layers.{int(found[1]) - 1}.conv."),
    (r"\.conv\.conv_layers\.(\d)\.", r".front.layers.\1.conv."),
    (r"\.groupnorm\.", ".front.layers.0.norm."),
    (r"\.embeddings\.patch_embeddings\.projection\.", ".front.conv."),
    (r"\.embeddings\.position_embeddings", ".pos"),
]


class Family(NamedTuple):
    """A model of transformers, its canonical configuration and an input of the encoder graph."""

    theirs: Any
    config: TransformerConfig
    x: Tensor

    def logits(self, target_ids: Tensor) -> Tensor:
        """Compute the logits of transformers."""
        inputs = {"decoder_input_ids": target_ids}
        if isinstance(self.theirs, WhisperForConditionalGeneration):
            found = self.theirs(input_features=self.x.transpose(1, 2), **inputs)
        elif isinstance(self.theirs, MoonshineForConditionalGeneration):
            found = self.theirs(input_values=self.x[:, :, 0], **inputs)
        else:
            found = self.theirs(self.x, **inputs)
        return found.logits  # type: ignore[no-any-return]

    def canonical(self) -> Transformer:
        """Copy the weights; a bias that transformers lack is 0."""
        model = Transformer(self.config).double().eval()
        state = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.endswith("bias")}
        for name, value in {**self.theirs.state_dict(), **dict(self.theirs.named_buffers())}.items():
            state[renamed(name)] = value.detach().clone()
        for side in ("enc", "dec"):
            if (table := state.pop(f"{side}.embed_positions.weights", None)) is not None:  # of Speech2Text
                state[f"{side}.pos"] = table[2 : 2 + LENGTH]
        if self.config.image is not None:
            tokens = [state.pop(f"enc.embeddings.{name}_token", None) for name in ("cls", "distillation")]
            state["enc.front.tokens"] = torch.cat([token[0] for token in tokens if token is not None])
            state["enc.pos"], state["dec.pos"] = state["enc.pos"][0], state["dec.pos"][2:]
            if (weight := state.pop("enc_to_dec_proj.weight", None)) is not None:
                project(state, weight, state.pop("enc_to_dec_proj.bias"))
        if self.config.decoder is not None and self.config.decoder.feed_forward == "glu":
            for name in [name for name in state if name.startswith("dec.") and ".fc1." in name]:
                state[name.replace("fc1", "gate")], state[name] = state[name].chunk(2)
        known = {name: state[name] for name in model.state_dict()}
        assert not [name for name in state.keys() - known.keys() if not re.search("inv_freq|pooler", name)]
        model.load_state_dict(known)
        return model


def renamed(name: str) -> str:
    """Return the canonical name of a tensor of transformers."""
    return functools.reduce(lambda found, change: re.sub(*change, found), NAMES, name)


def project(state: dict[str, Tensor], weight: Tensor, bias: Tensor) -> None:
    """Join a map between encoder and decoder with the projections that read it."""
    for name in [name for name in state if re.search(r"cross\.[kv]\.weight", name)]:
        state[name.replace("weight", "bias")] += state[name] @ bias
        state[name] = state[name] @ weight


def convolution(channels: int, kernel: int, stride: int, activation: Any, **more: Any) -> ConvolutionConfig:
    return ConvolutionConfig(channels=channels, kernel=kernel, stride=stride, activation=activation, **more)


def whisper() -> Family:
    convolutions = (convolution(32, 3, 1, "gelu", padding=1), convolution(32, 3, 2, "gelu", padding=1))
    config = tiny.config(
        encoder=PRE, decoder=PRE, source_vocab=0, activation="gelu", output_bias=False, tie_output=True,
        features=FeaturesConfig(dim=8, convolutions=convolutions, projection=False, frames=48),
    )  # fmt: skip
    theirs = WhisperForConditionalGeneration(
        WhisperConfig(**SIZES, num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=LENGTH)
    )
    return Family(theirs, config, torch.randn(2, 48, 8, dtype=torch.float64))


def speech_to_text() -> Family:
    convolutions = (convolution(10, 5, 2, "glu", padding=2), convolution(32, 3, 2, "glu", padding=1))
    config = tiny.config(
        encoder=PRE, decoder=PRE, source_vocab=0, embedding_scale=32**0.5, output_bias=False, tie_output=True,
        features=FeaturesConfig(dim=8, convolutions=convolutions, projection=False),
    )  # fmt: skip
    theirs = Speech2TextForConditionalGeneration(
        Speech2TextConfig(
            **SIZES, input_feat_per_channel=8, conv_channels=20, conv_kernel_sizes=(5, 3), num_conv_layers=2,
            max_source_positions=LENGTH, max_target_positions=LENGTH,
        )
    )  # fmt: skip
    return Family(theirs, config, torch.randn(2, 43, 8, dtype=torch.float64))


def moonshine() -> Family:
    convolutions = (
        convolution(32, 127, 64, "tanh", bias=False, group_norm=True),
        convolution(64, 7, 3, "gelu"),
        convolution(32, 3, 2, "gelu"),
    )
    config = tiny.config(
        encoder=PRE,
        decoder={**PRE, "activation": "silu", "feed_forward": "glu"},
        source_vocab=0,
        features=FeaturesConfig(dim=1, convolutions=convolutions, projection=False),
        activation="gelu",
        positions="rotary",
        rotary_dim=6,
        rotary_pairs="interleaved",
        attention_bias=False,
        norm_bias=False,
        output_bias=False,
        tie_output=True,
    )
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    theirs = MoonshineForConditionalGeneration(
        MoonshineConfig(
            vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
            pad_token_id=0, rope_parameters=rotation, pad_head_dim_to_multiple_of=8,
        )
    )  # fmt: skip
    return Family(theirs, config, torch.randn(2, 4000, 1, dtype=torch.float64))


def captions(encoder: Any, tokens: int, **decoder: Any) -> Family:
    config = tiny.config(
        encoder={**PRE, "d_model": 24, "num_heads": 2, "d_ff": 40, "norm_eps": 1e-12, "embedding_scale": 1.0},
        decoder={"embedding_norm": True, "activation": "relu"},
        source_vocab=0,
        max_source_length=12 + tokens,
        image=ImageConfig(channels=3, height=12, width=20, patch_height=4, patch_width=5, class_tokens=tokens),
        activation="gelu",
        embedding_scale=32**0.5,
        output_bias=False,
    )
    text = TrOCRConfig(
        vocab_size=tiny.VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        max_position_embeddings=LENGTH, activation_function="relu", scale_embedding=True, tie_word_embeddings=False,
        is_decoder=True, add_cross_attention=True, **decoder,
    )  # fmt: skip
    both = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, text)
    return Family(VisionEncoderDecoderModel(both), config, torch.randn(2, 3, 12, 20, dtype=torch.float64))


FAMILIES = {
    "whisper": whisper,
    "speech_to_text": speech_to_text,
    "moonshine": moonshine,
    "vit and trocr": lambda: captions(ViTConfig(**ViT), 1, cross_attention_hidden_size=24),
    "deit and trocr, projected": lambda: captions(DeiTConfig(**ViT), 2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    tiny.randomise(family.theirs)
    family.theirs.double().eval()
    target_ids = tiny.batch().target_ids[:2]
    with torch.no_grad():
        expected, model = family.logits(target_ids), family.canonical()
        kind = model_spec(family.config, "fp32").source
        x, mask = encoder_inputs(kind, [family.x, torch.ones(family.x.shape[:2]).bool()][: len(kind.inputs)])
        found = model(x, mask, target_ids)
    assert expected.std() > 0.1
    tolerance = 1e-6 if name == "moonshine" else 1e-12  # it computes angles in float32
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
