"""Speech2Text and Moonshine generate the ids of transformers, alone and in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, Speech2TextFeatureExtractor, Wav2Vec2FeatureExtractor

from tests import tiny
from tests.importing.huggingface.odd_texts import odd_texts
from tests.importing.huggingface.published import opened
from tests.importing.huggingface.test_tokenizer_directories import train
from tfexport import load
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError, InputError, ParityError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

RATE = 16_000
WORDS = [f"word{number}" for number in range(41)]
CONFIGS: dict[str, dict[str, Any]] = {
    "Speech2Text": {
        "vocab_size": 41, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "conv_channels": 24,
        "conv_kernel_sizes": [5, 3], "input_feat_per_channel": 12, "max_source_positions": 200,
        "max_target_positions": 40,
    },
    "Moonshine": {
        "vocab_size": 41, "hidden_size": 40, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
        "pad_head_dim_to_multiple_of": 16, "max_position_embeddings": 40,
    },
}  # fmt: skip
EXTRACTORS = {
    "Speech2Text": Speech2TextFeatureExtractor(num_mel_bins=12, feature_size=12),
    "Moonshine": Wav2Vec2FeatureExtractor(do_normalize=False),
}
GENERATION: dict[str, Any] = {"max_length": 14, "no_repeat_ngram_size": 2, "num_beams": 4, "length_penalty": 0.8}
GENERATION["suppress_tokens"] = [1]  # padding, to which Speech2Text gives no position


class Directory(NamedTuple):
    """A Hugging Face directory with random weights, and its model in float64."""

    path: Path
    model: Any

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 [frames, dim] of the extractor of transformers."""
        extractor = EXTRACTORS[type(self.model).__name__.removesuffix("ForConditionalGeneration")]
        found = extractor(samples, sampling_rate=RATE, return_tensors="np")[extractor.model_input_names[0]][0]
        return found.reshape(len(found), -1)

    def input(self, features: np.ndarray) -> Tensor:
        x = torch.from_numpy(features)[None].double()
        return x if self.model.main_input_name == "input_features" else x[..., 0]

    @torch.inference_mode()
    def generate(self, features: np.ndarray, **options: Any) -> list[int]:
        return self.model.generate(self.input(features), **options)[0, 1:].tolist()


def write(folder: Path, name: str, generation: dict[str, Any] | None = None, **changes: Any) -> Directory:
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind(kind.config_class(**{**CONFIGS[name], **changes})).eval()
    tiny.randomise(model)
    model.tie_weights()
    tokens = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    model.generation_config = GenerationConfig(**tokens, **(generation or GENERATION))
    model.save_pretrained(folder)
    EXTRACTORS[name].save_pretrained(folder)
    return Directory(folder, kind.from_pretrained(folder).double().eval())


def signals(count: int) -> Iterator[np.ndarray]:
    """Yield signals of 0.06 to 1 s."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        time = np.arange(rng.integers(960, RATE)) / RATE
        tone = np.sin(2 * np.pi * rng.uniform(80, 2000) * time * (1 + rng.uniform(0, 2) * time))
        yield (rng.uniform(0, 0.5) * tone + rng.uniform(0.01, 0.3) * rng.normal(size=len(time))).astype(np.float32)


@pytest.mark.parametrize("count", [7, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_ids_are_those_of_transformers(name: str, count: int, tmp_path: Path) -> None:
    """With the beams of the directory and greedily, in a batch and alone, on eager and ONNX Runtime."""
    theirs = write(tmp_path / "hf", name)
    tiny.word_tokenizer(WORDS).save(str(tmp_path / "hf" / "tokenizer.json"))
    assert import_checkpoint(theirs.path, tmp_path / "model").certificate.proven
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(variants=("concat",)), verify=False)
    audio = list(signals(count))
    sources = [theirs.features(samples) for samples in audio]
    assert len({len(source) for source in sources}) > count // 4
    with load(tmp_path / "bundle", threads=1) as model:
        sessions = {"eager": EagerSession(load_model(tmp_path / "model")), "ort": model.session}
        for options in ({}, {"num_beams": 1}):
            expected = [theirs.generate(source, **options) for source in sources]
            assert len({tuple(ids) for ids in expected}) > count // 4, "texts differ"
            config = model.decoding(**options)
            for backend, session in sessions.items():
                together = decode(session, sources, config)
                alone = [decode(session, [source], config)[0] for source in sources]
                for found in (together, alone):
                    assert [list(best.token_ids) for (best,) in found] == expected, (backend, options)
        texts = [result.text for result in model.generate([(samples, RATE) for samples in audio], num_beams=1)]
    assert texts == [" ".join(WORDS[i] for i in ids if i > 3) for ids in expected]


def tokenizer(folder: Path, **settings: Any) -> transformers.Speech2TextTokenizer:
    """Write a tokenizer as fairseq trains it, with the languages of MuST-C."""
    folder.mkdir(exist_ok=True)
    languages = [f"<lang:{code}>" for code in ("pt", "fr", "ru", "nl", "ro", "it", "es", "de")]
    spm = folder / "sentencepiece.bpe.model"
    pieces = train(spm, bos_id=0, pad_id=1, eos_id=2, unk_id=3, user_defined_symbols=languages)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    theirs = transformers.Speech2TextTokenizer(str(folder / "vocab.json"), str(spm), **settings)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("settings", "language"),
    [
        ({}, None),
        ({"do_upper_case": True, "do_lower_case": True}, None),
        ({"lang_codes": "mustc", "tgt_lang": "fr"}, "de"),
    ],
)
def test_texts_are_those_of_transformers(settings: dict[str, Any], language: str | None, tmp_path: Path) -> None:
    theirs = tokenizer(tmp_path / "hf", **settings)
    write(tmp_path / "hf", "Speech2Text", vocab_size=len(theirs), max_target_positions=2000)
    config = ImportConfig(target_language=language, compare=False)
    import_checkpoint(tmp_path / "hf", tmp_path / "model", config)
    ours, defaults = opened(tmp_path / "model")
    assert defaults.forced_bos_token_id == (theirs.lang_code_to_id[language] if language else None)
    for text in odd_texts():
        ids = theirs.sp_model.encode(text.lower() if "do_lower_case" in settings else text)
        if set(ids) <= {theirs.unk_token_id}:
            with pytest.raises(InputError):
                ours.encode_target(text)
        else:
            assert ours.encode_target(text) == ids, text
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(theirs), (200, 9)).tolist()
    assert [ours.decode(ids) for ids in rows] == [theirs.decode(ids, skip_special_tokens=True) for ids in rows]


def dropped(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


CONVOLUTION = "model.encoder.conv.conv_layers.{}.weight"


@pytest.mark.parametrize(
    ("name", "change", "config", "part"),
    [
        ("Speech2Text", dropped(CONVOLUTION.format(0)), {}, "front.layers.0.conv"),
        ("Speech2Text", changed(CONVOLUTION.format(1), 64, 12, 5), {}, "front.layers.1.conv"),
        ("Speech2Text", changed(CONVOLUTION.format(2), 64, 12, 3), {}, "front.layers.2.conv"),
        ("Speech2Text", changed("model.encoder.adapter.weight", 9, 9), {}, "model.encoder.adapter.weight"),
        ("Speech2Text", None, {"activation_function": "mish"}, "activation_function"),
        ("Speech2Text", None, {"conv_kernel_sizes": [4, 3]}, "conv_kernel_sizes"),
        ("Speech2Text", None, {"input_feat_per_channel": 80}, "front.layers.0.conv"),
        ("Speech2Text", None, {"pad_token_id": 0}, "pad_token_id"),
        ("Speech2Text", None, {"decoder_start_token_id": 1}, "pad_token_id"),
        ("Moonshine", dropped("model.encoder.groupnorm.weight"), {}, "front.layers.0.norm"),
        ("Moonshine", changed("model.encoder.conv2.weight", 80, 40, 5), {}, "front.layers.1.conv"),
        ("Moonshine", None, {"decoder_hidden_act": "mish"}, "decoder_hidden_act"),
        ("Moonshine", None, {"decoder_num_key_value_heads": 1}, "decoder_num_key_value_heads"),
        ("Moonshine", None, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    name: str, change: Callable[[dict[str, Tensor]], object] | None, config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "hf", name).path
    file, stored = folder / "config.json", load_file(folder / "model.safetensors")
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if change:
        change(stored)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((CheckpointError, ParityError)) as caught:
        import_checkpoint(folder, tmp_path / "model")
    (problem,) = caught.value.problems
    assert part in problem
    assert not (tmp_path / "model").exists()


def test_without_a_processor_the_model_reads_features(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", "Speech2Text").path
    (folder / "preprocessor_config.json").unlink()
    notes = import_checkpoint(folder, tmp_path / "model", ImportConfig(compare=False)).notes
    assert sum("preprocessor_config.json" in note for note in notes) == 1
    assert not (tmp_path / "model" / "processor.json").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Speech2Text", {"scale_embedding": False, "activation_function": "gelu", "pad_token_id": 3}),
        ("Speech2Text", {"conv_kernel_sizes": [3, 5, 3], "num_conv_layers": 3, "tie_word_embeddings": False}),
        ("Moonshine", {"attention_bias": True, "encoder_hidden_act": "relu", "decoder_hidden_act": "gelu"}),
        ("Moonshine", {"hidden_size": 32, "pad_head_dim_to_multiple_of": None, "tie_word_embeddings": False}),
    ],
)
def test_configurations_are_proven(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", name, **changes).path
    assert import_checkpoint(folder, tmp_path / "model").certificate.proven
