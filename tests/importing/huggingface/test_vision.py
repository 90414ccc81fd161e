"""VisionEncoderDecoder directories are imported, and read images as transformers does."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    DonutSwinConfig,
    GenerationConfig,
    MBartConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)

import tfexport
from tests import tiny
from tests.conftest import Once
from tests.importing.huggingface import published, vision
from tests.importing.huggingface.vision import CONFIGS, TOKENS
from tfexport.bundle.processor import ProcessorConfig
from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.export import export_module
from tfexport.export._pipeline import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.model.model import Model
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "no_repeat_ngram_size": 1}  # these models would repeat one token


def imported(name: str, once: Once) -> Path:
    def make(folder: Path) -> None:
        vision.write(folder / "hf", name)
        found = import_checkpoint(folder / "hf", folder / "model")
        assert found.certificate.proven
        assert found.certificate.tolerance == 1e-9

    return once(f"vision {name}", make)


def eager(folder: Path) -> Model:
    session, (tokenizer, defaults) = EagerSession(load_model(folder / "model")), published.opened(folder / "model")
    processor = ProcessorConfig.read(folder / "model" / "processor.json", session.spec).processor
    return Model(session, tokenizer, defaults, processor=processor)


def bundled(folder: Path, once: Once) -> Model:
    config = ExportConfig(variants=("static",))
    bundle = once(f"{folder.name} bundle", lambda path: export_bundle(str(folder / "model"), path, config))
    return tfexport.load(bundle, backend="ort")


def pixels(folder: Path, files: Sequence[bytes]) -> Tensor:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt").pixel_values


def assert_same_ids(model: Model, sources: list[Any], theirs: Any, images: Tensor) -> None:
    """Compare greedy search and beams, of images alone and in a batch."""
    for beams in (1, 4):
        with torch.inference_mode():
            rows = theirs.generate(images, num_beams=beams, **OPTIONS)[:, 1:].tolist()
        expected = [row[: row.index(2) + 1] if 2 in row else row for row in rows]
        assert len({tuple(ids) for ids in expected}) > len(images) // 2, "texts depend on the image"
        for batch_size in (1, len(images)):
            found = model.generate_ids(sources, num_beams=beams, batch_size=batch_size, **OPTIONS)
            assert [list(best.token_ids) for best, *_ in found] == expected


def compare(model: Model, folder: Path, count: int) -> None:
    files = list(vision.images(count))
    assert_same_ids(model, model.read(files), vision.load(folder / "hf"), pixels(folder / "hf", files))


@pytest.mark.parametrize("name", CONFIGS)
def test_images_are_read_as_in_transformers(name: str, once: Once) -> None:
    folder = imported(name, once)
    compare(eager(folder), folder, 12)


def test_a_bundle_reads_images_as_transformers(once: Once) -> None:
    folder = imported("projected", once)
    with bundled(folder, once) as model:
        compare(model, folder, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_many_images_are_read_as_in_transformers(name: str, once: Once) -> None:
    folder = imported(name, once)
    compare(eager(folder), folder, 200)
    with bundled(folder, once) as model:
        compare(model, folder, 200)


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "in the decoder"])
def test_options_of_config_json_and_texts(outside: bool, tmp_path: Path) -> None:
    options = {
        "max_length": 14,
        "num_beams": 3,
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    }
    folder = vision.write(tmp_path / "hf", "small", **(options if outside else {}))
    if not outside:
        config = json.loads((folder / "config.json").read_text())
        config["decoder"] |= {"top_k": 50, "temperature": 1.0, **options}
        (folder / "config.json").write_text(json.dumps(config))
    import_checkpoint(folder, tmp_path / "model")
    files = list(vision.images(6))
    with torch.inference_mode():
        rows = vision.load(folder).generate(pixels(folder, files))
    texts, model = vision.tokenizer(folder).batch_decode(rows, skip_special_tokens=True), eager(tmp_path)
    assert model.defaults.given() == options
    assert [result.text for result in model.generate(files)] == texts


@pytest.mark.parametrize(
    ("name", "side", "changes", "problem"),
    [
        ("trocr", "encoder", {"model_type": "swin"}, "docs/guides/your-own-module.md"),
        ("trocr", "decoder", {"model_type": "bert"}, "docs/guides/your-own-module.md"),
        ("trocr", "decoder", {"model_type": ["trocr"]}, "docs/guides/your-own-module.md"),
        ("trocr", "encoder", {"qkv_bias": True}, "query.bias"),
        ("trocr", "encoder", {"num_hidden_layers": 3}, "encoder.num_hidden_layers"),
        ("trocr", "encoder", {"image_size": "384"}, "encoder.image_size"),
        ("trocr", "encoder", {"patch_size": [64, 64]}, "patches"),
        ("trocr", "encoder", {"image_size": 48}, "enc.pos"),
        ("trocr", "encoder", {"hidden_act": "tanh"}, "encoder.hidden_act"),
        ("trocr", "encoder", {"image_size": 16}, "enc.pos"),
        ("trocr", "encoder", {"model_type": "deit"}, "enc.pos"),
        ("trocr", "decoder", {"tie_word_embeddings": False}, "decoder.output_projection.weight"),
        ("trocr", "decoder", {"use_learned_position_embeddings": False}, "embed_positions.weight"),
        ("trocr", "decoder", {"cross_attention_hidden_size": None}, "enc_to_dec_proj.weight"),
        ("trocr", "decoder", {"layernorm_embedding": False}, "dec.emb_norm"),
        ("projected", "decoder", {"cross_attention_hidden_size": 24}, "enc_to_dec_proj.weight"),
        ("stage1", "decoder", {"use_learned_position_embeddings": True}, "embed_positions.weight"),
        ("stage1", "decoder", {"pad_token_id": 0}, "decoder.pad_token_id"),
        ("gpt2", "decoder", {"scale_attn_weights": False}, "decoder.scale_attn_weights"),
        ("gpt2", "decoder", {"n_layer": 1}, "decoder.n_layer"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    name: str, side: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = vision.write(tmp_path / "hf", name)
    config = json.loads((folder / "config.json").read_text())
    config[side] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        import_checkpoint(folder, tmp_path / "model")
    assert problem in str(caught.value), caught.value
    assert len(caught.value.problems) <= 2, caught.value.problems


def test_weights_of_another_size_than_config_json_describes_are_refused(tmp_path: Path) -> None:
    folder = vision.write(tmp_path / "hf", "projected")
    config = json.loads((folder / "config.json").read_text())
    config["encoder"]["intermediate_size"] = 41
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ParityError) as caught:
        import_checkpoint(folder, tmp_path / "model")
    assert "encoder.encoder.layer.0.intermediate.dense.bias is [40]" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("trocr", "encoder.embeddings.cls_token"),
        ("small", "encoder.embeddings.distillation_token"),
        ("small", "encoder.encoder.layer.1.attention.attention.key.weight"),
        ("projected", "decoder.model.decoder.layers.0.encoder_attn.k_proj.weight"),
        ("projected", "enc_to_dec_proj.weight"),
        ("projected", "enc_to_dec_proj.bias"),
        ("gpt2", "decoder.transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", "decoder.transformer.wpe.weight"),
    ],
)
def test_a_missing_weight_is_named(name: str, key: str, tmp_path: Path) -> None:
    folder = vision.write(tmp_path / "hf", name)
    published.save(folder, {each: tensor for each, tensor in published.weights(folder).items() if each != key})
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(folder, tmp_path / "model")
    assert len(caught.value.problems) <= 2, caught.value.problems


@pytest.mark.slow
def test_the_documented_module_of_swin_and_mbart(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "your-own-module.md"
    code: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(next(block for block in blocks if "Donut" in block), code)
    encoder = DonutSwinConfig(
        image_size=[vision.HEIGHT, vision.WIDTH], patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
        window_size=4,
    )  # fmt: skip
    decoder = MBartConfig(
        vocab_size=vision.VOCAB, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32,
        max_position_embeddings=vision.LENGTH, scale_embedding=True, forced_eos_token_id=None,
    )  # fmt: skip
    theirs = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    tiny.randomise(theirs)
    theirs.eval().generation_config = GenerationConfig(**TOKENS)
    bundle = export_module(code["make"](theirs), tmp_path / "bundle", ExportConfig(variants=("static",)))
    assert bundle.manifest.proof.status == "consistent"
    files = list(vision.images(200))
    images = pixels(vision.write(tmp_path / "hf", "trocr"), files)
    with tfexport.load(tmp_path / "bundle", backend="ort") as model:
        assert_same_ids(model, list(images.numpy()), theirs, images)
