"""Tiny VisionEncoderDecoder directories with random weights, as they are published or saved, and images for them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DeiTConfig,
    GPT2Config,
    RobertaTokenizer,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessorPil,
)

from tests import tiny
from tests.importing.huggingface import published
from tests.importing.huggingface.odd_texts import LINES

VOCAB, LENGTH, HEIGHT, WIDTH = 300, 24, 32, 64
ENCODER: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "image_size": [HEIGHT, WIDTH], "patch_size": [8, 16],
}  # fmt: skip
TROCR: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
SMALL = {"activation_function": "relu", "scale_embedding": True, "tie_word_embeddings": False}
COMPUTED = {**SMALL, "use_learned_position_embeddings": False, "layernorm_embedding": False}
# Like trocr-base-handwritten, trocr-small-printed, trocr-base-stage1 and vit-gpt2-image-captioning, and two others.
CONFIGS: dict[str, tuple[Any, Any]] = {
    "trocr": (ViTConfig(**ENCODER, qkv_bias=False), TrOCRConfig(**TROCR, cross_attention_hidden_size=24)),
    "small": (DeiTConfig(**ENCODER), TrOCRConfig(**TROCR, **SMALL, cross_attention_hidden_size=24)),
    "stage1": (ViTConfig(**ENCODER, qkv_bias=False), TrOCRConfig(**TROCR, **COMPUTED, cross_attention_hidden_size=24)),
    "projected": (DeiTConfig(**ENCODER, hidden_act="gelu_new"), TrOCRConfig(**TROCR)),
    "gpt2": (ViTConfig(**ENCODER, layer_norm_eps=1e-5), GPT2Config(**GPT2, bos_token_id=2, eos_token_id=2)),
    "gpt2, projected": (DeiTConfig(**ENCODER), GPT2Config(**GPT2 | {"n_embd": 32}, tie_word_embeddings=False)),
}
TOKENS = {"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}


def write(folder: Path, name: str, **options: Any) -> Path:
    """Write a directory with `options` in config.json, as older versions of transformers did."""
    encoder, decoder = CONFIGS[name]
    model = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    tiny.randomise(model)
    model.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **TOKENS, **options}))
    (folder / "generation_config.json").unlink()
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(LINES, VOCAB, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    if name == "stage1":  # buffers that older versions stored
        tensors = published.weights(folder)
        tensors["decoder.model.decoder.embed_positions._float_tensor"] = torch.zeros(1)
        published.save(folder, tensors)
    if name == "gpt2":
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
        names = [f"decoder.transformer.h.{i}.{part}" for i in range(2) for part in ("attn", "crossattention")]
        buffers = {f"{one}.bias": mask for one in names} | {f"{one}.masked_bias": torch.tensor(-1e4) for one in names}
        published.save(folder, {**published.weights(folder), **buffers})
    return folder


def load(folder: Path) -> Any:
    """Load a directory with transformers, and compute the positions that it leaves without values."""
    model = VisionEncoderDecoderModel.from_pretrained(folder).eval()
    if getattr(model.config.decoder, "use_learned_position_embeddings", True) is False:
        positions = model.decoder.model.decoder.embed_positions
        assert positions.weights.is_meta, "remove this difference here, in _vision.py and in the guide"
        positions.weights = positions.get_embedding(LENGTH + 2, TROCR["d_model"], 1)
    return model


def tokenizer(folder: Path) -> Any:
    return RobertaTokenizer.from_pretrained(folder)


def images(count: int) -> Iterator[bytes]:
    """Yield PNG images of any size: random pixels, and drawn text."""
    rng = np.random.default_rng(0)
    for number in range(count):
        height, width = (int(edge) for edge in rng.integers(12, 200, 2))
        pixels: NDArray[np.uint8] = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels if number % 2 else pixels // 4 + 190)
        if number % 2 == 0:
            text, font = f"Line {number} of 1847", ImageFont.load_default(int(rng.integers(8, 60)))
            ImageDraw.Draw(image).text((2, height // 4), text, (20, 40, 60), font)
        image.save(file := io.BytesIO(), "PNG")
        yield file.getvalue()
