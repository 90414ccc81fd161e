"""Audio and images as files, bytes, samples and features, through a bundle with its processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tfexport
from tests import tiny
from tests.command import ran, refuses, run
from tests.conftest import Once
from tests.features.signals import wav
from tfexport._io.strict_json import render
from tfexport.bundle.processor import ProcessorConfig
from tfexport.errors import ConfigError, InputError
from tfexport.export._pipeline import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.features.config import AudioConfig, ImageConfig
from tfexport.model.model import Model
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig
from tfexport.nn.config import ImageConfig as Patches
from tfexport.nn.directory import save_model

AUDIO = ProcessorConfig(audio=AudioConfig(kind="fbank", feature_dim=20, subtract_mean=True, divide_by_std=True))
IMAGE = ProcessorConfig(image=ImageConfig(height=16, width=24))
CONVOLUTION = ConvolutionConfig(channels=24, kernel=3, stride=2, padding=1, activation="gelu")
LIMITS: Any = {"source_vocab": 0, "tie_embeddings": False, "tie_output": False, "max_source_length": 200}
SPEECH = tiny.config(features=FeaturesConfig(dim=20, convolutions=(CONVOLUTION,)), **LIMITS)
CAPTIONS = tiny.config(image=Patches(channels=3, height=16, width=24, patch_height=8, patch_width=8), **LIMITS)


def write_bundle(path: Path, config: Any, processor: ProcessorConfig) -> None:
    words = tiny.word_tokenizer(["<pad>", "<s>", "</s>", "<unk>", *(f"w{word}" for word in range(tiny.VOCAB - 4))])
    path.parent.mkdir(exist_ok=True)
    words.save(str(tokenizer := path.with_suffix(".tokenizer.json")))
    files = {"processor.json": render(processor.to_dict())}
    save_model(tiny.model(config, dtype=torch.float32), path.with_suffix(".model"), tokenizer, files=files)
    export_bundle(str(path.with_suffix(".model")), path, ExportConfig(variants=("contrib",)))


@pytest.fixture(scope="module")
def captions(once: Once) -> Iterator[Model]:
    with tfexport.load(once("captions", lambda path: write_bundle(path, CAPTIONS, IMAGE))) as model:
        yield model


def samples(seconds: float = 0.5, seed: int = 0) -> NDArray[np.float32]:
    """Return a tone with noise, in steps of 16 bits."""
    count = int(seconds * 16_000)
    tone = np.sin(np.arange(count) * (0.05 + 0.01 * seed)) + np.random.default_rng(seed).normal(0, 0.1, count)
    return np.trunc(8_000 * tone).astype(np.float32) / 2**15


def test_files_bytes_samples_and_features_give_one_text(speech: Model, tmp_path: Path) -> None:
    signal = samples()
    (path := tmp_path / "a.wav").write_bytes(wav(signal))
    assert speech.processor is not None
    features = speech.processor.extract(path)
    inputs = [path, str(path), wav(signal), (signal, 16_000), features]
    results = speech.generate(inputs, max_new_tokens=6)
    assert len({result.token_ids for result in results}) == 1
    assert results[0].token_ids == speech.generate_ids([features], max_new_tokens=6)[0][0].token_ids
    assert "".join(speech.stream(path, max_new_tokens=6)) == results[0].text


def test_audio_of_mixed_length_is_read_as_if_alone(speech: Model) -> None:
    files = [wav(samples(seconds, seed)) for seed, seconds in enumerate((0.1, 1.3, 0.4, 2.0, 0.7))]
    for beams in (1, 4):
        together = speech.generate(files, num_beams=beams, max_new_tokens=8)
        alone = [speech.generate([file], num_beams=beams, max_new_tokens=8)[0] for file in files]
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) > 1


def test_scores_equal_those_of_the_search(speech: Model) -> None:
    (best,) = speech.generate([wav(samples())], max_new_tokens=6)
    (score,) = speech.score_ids(speech.read([wav(samples())]), [best.token_ids], add_eos=False)
    assert score.log_prob == pytest.approx(best.score * len(best.token_ids), abs=1e-4)


def test_every_bad_input_is_listed_and_a_text_is_no_file_for_a_server(speech: Model, tmp_path: Path) -> None:
    (path := tmp_path / "a.wav").write_bytes(wav(samples()))
    bad: list[Any] = [b"", b"RIFF", np.zeros((9, 3), np.float32), np.full((9, 20), np.nan, np.float32), "missing.wav"]
    with pytest.raises(InputError) as error:
        speech.generate([path, *bad])
    assert error.value.indices == (1, 2, 3, 4, 5)
    for paths in ([str(path)], ["hello"]):
        with pytest.raises(InputError):
            speech.read(paths, paths=False)
    with pytest.raises(InputError):
        speech.generate([])
    with pytest.raises(ConfigError):
        speech.generate([path], replace_unknowns=True)


def test_images_of_any_size_are_read(captions: Model, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    files = []
    for number, size in enumerate(((24, 16), (100, 40), (9, 90))):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3)).astype(np.uint8)
        image.fromarray(pixels).save(path := tmp_path / f"{number}.png")
        files.append(path)
    together = captions.generate(files, max_new_tokens=6)
    alone = [captions.generate([path.read_bytes()], max_new_tokens=6)[0] for path in files]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_the_command_reads_files(speech: Model, speech_bundle: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"{number}.wav" for number in range(2)]
    for number, name in enumerate(names):
        name.write_bytes(wav(samples(0.3 + number, number)))
    expected = [result.text for result in speech.generate(names, max_new_tokens=5)]
    assert ran("generate", speech_bundle, *names, "--max-new-tokens", 5).stdout.splitlines() == expected
    listed = "\n".join(map(str, names)).encode()
    assert run("generate", speech_bundle, "--max-new-tokens", 5, stdin=listed).stdout.splitlines() == expected
    refuses(run("generate", speech_bundle, names[0], tmp_path / "missing.wav"), "missing.wav")


def test_a_processor_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for processor in (IMAGE, ProcessorConfig(audio=AudioConfig(kind="fbank", feature_dim=40))):
        with pytest.raises(ConfigError):
            write_bundle(tmp_path / f"{len(str(processor))}", SPEECH, processor)
    with pytest.raises(ConfigError):
        ProcessorConfig()
