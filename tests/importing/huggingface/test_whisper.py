"""Whisper directories generate the ids and texts of transformers, for every prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperTokenizer

import tfexport
from tests.features.signals import wav
from tests.importing.huggingface import whisper
from tests.importing.huggingface.whisper import (
    ENGLISH,
    EOS,
    ID,
    MULTILINGUAL,
    NO_TIMESTAMPS,
    RATE,
    TIMESTAMPS,
    TOKENS,
    VOCAB,
)
from tests.serve.http.served import serving
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError, InputError, ParityError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.importing.importer import import_checkpoint
from tfexport.model.model import Model
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.session import Session
from tfexport.serve.engine import Engine
from tfexport.verify import VerifyConfig, verify_bundle

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 4},
    {"language": "de"},
    {"language": "fr", "task": "translate", "num_beams": 4, "length_penalty": 0.5},
    {"task": "translate", "max_new_tokens": 7},
    {"return_timestamps": True},
    {"return_timestamps": True, "num_beams": 4},
    {"return_timestamps": True, "language": "en", "max_initial_timestamp_index": None, "repetition_penalty": 1.3},
]
IDS = [" ".join(f"{name}={value}" for name, value in options.items()) or "defaults" for options in OPTIONS]


class Pair(NamedTuple):
    """A directory of transformers, its model, and what was imported and exported."""

    folder: Path
    theirs: Any
    defaults: GenerationDefaults
    eager: Session
    bundle: Model


def imported(folder: Path, lines: list[str] | None = None) -> GenerationDefaults:
    """Import folder/hf and return its generation defaults."""
    found = import_checkpoint(
        folder / "hf", folder / "model", report=(lambda _: None) if lines is None else lines.append
    )
    assert found.certificate.proven
    path = folder / "model" / "generation.json"
    return GenerationDefaults.from_dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whisper")
    whisper.write(folder / "hf")
    defaults = imported(folder)
    export_bundle(str(folder / "model"), folder / "bundle", ExportConfig(variants=("contrib",)), verify=False)
    eager = EagerSession(load_model(folder / "model").double())
    with tfexport.load(folder / "bundle") as model:
        yield Pair(folder, whisper.load(folder / "hf"), defaults, eager, model)


@torch.inference_mode()
def generate(theirs: Any, features: np.ndarray, **options: Any) -> list[tuple[int, ...]]:
    """Return the ids of one pass of transformers, with the prompt and up to the end."""
    inputs = torch.from_numpy(features).to(theirs.dtype).transpose(1, 2)
    rows = theirs.generate(inputs, force_unique_generate_call=True, **options)[:, 1:].tolist()
    return [tuple(row[: row.index(EOS) + 1] if EOS in row else row) for row in rows]


def default_ids(theirs: Any, features: np.ndarray, **options: Any) -> list[list[int]]:
    """Return what `generate` of transformers returns by default: neither prompt nor end."""
    inputs = torch.from_numpy(features).to(theirs.dtype).transpose(1, 2)
    rows = theirs.generate(inputs, **options).tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def ids_of(session: Session, features: np.ndarray, config: DecodeConfig, batch_size: int = 8) -> list[tuple[int, ...]]:
    return [best[0].token_ids for best in decode(session, features, config, batch_size=batch_size)]


def compare(pair: Pair, options: dict[str, Any], count: int, seed: int = 0) -> None:
    """Compare the ids of `count` sources in float64 and with ONNX Runtime, in batches and alone."""
    features = whisper.features(pair.folder / "hf", whisper.waveforms(count, seed))
    expected, config = generate(pair.theirs, features, **options), pair.defaults.overridden(options)
    assert len(set(expected)) > count // 3, "texts that are all alike prove nothing"
    assert ids_of(pair.eager, features, config) == expected
    assert ids_of(pair.bundle.session, features, config) == expected
    alone = features[: count // 4]
    assert ids_of(pair.bundle.session, alone, config, batch_size=1) == expected[: count // 4]


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_ids_are_those_of_transformers(options: dict[str, Any], pair: Pair) -> None:
    compare(pair, options, 12)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_many_ids_are_those_of_transformers(options: dict[str, Any], pair: Pair) -> None:
    compare(pair, options, 200, seed=1)


# Prompts


@pytest.mark.parametrize(
    "changes",
    [
        {"forced_decoder_ids": [[1, ID["en"]], [2, ID["transcribe"]], [3, NO_TIMESTAMPS]]},
        {"forced_decoder_ids": [[1, ID["de"]], [2, ID["translate"]]], "max_length": 9},
        {"forced_decoder_ids": [[1, None]]},
        {"forced_decoder_ids": [[2, ID["translate"]]]},
        {"forced_decoder_ids": None, "max_length": 46},
        {"forced_decoder_ids": None, "language": "german", "task": "translate"},
        {"language": "<|fr|>", "return_timestamps": True, "num_beams": 2},
        {"forced_decoder_ids": None, "no_timestamps_token_id": None, "do_sample": True},
        {"forced_decoder_ids": None, "lang_to_id": None, "task_to_id": None, "max_new_tokens": 6},
        ENGLISH,
        {**ENGLISH, "return_timestamps": True},
    ],
)
def test_the_prompt_of_a_directory(changes: dict[str, Any], tmp_path: Path) -> None:
    generation = ENGLISH if changes.get("is_multilingual") is False else MULTILINGUAL
    given = {key: value for key, value in {**generation, **changes}.items() if value is not None}
    whisper.write(tmp_path / "hf", given)
    defaults, theirs = imported(tmp_path), whisper.load(tmp_path / "hf")
    features = whisper.features(tmp_path / "hf", whisper.waveforms(6))
    ours = EagerSession(load_model(tmp_path / "model").double())
    assert ids_of(ours, features, defaults.overridden({})) == generate(theirs, features)


def test_a_prompt_with_other_tokens_is_refused(tmp_path: Path) -> None:
    for number, forced in enumerate(([[1, 9]], [[1, None], [3, ID["transcribe"]]], [[1, ID["en"]]])):
        whisper.write(tmp_path / f"hf{number}", {**MULTILINGUAL, "forced_decoder_ids": forced})
        with pytest.raises(CheckpointError):
            import_checkpoint(tmp_path / f"hf{number}", tmp_path / "model")


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        (MULTILINGUAL, {"language": "german"}),
        (ENGLISH, {"language": "en"}),
        (ENGLISH, {"task": "translate"}),
        ({**TOKENS, "max_length": 20}, {"return_timestamps": True}),
    ],
)
def test_options_that_a_model_lacks(generation: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    whisper.write(tmp_path / "hf", generation)
    defaults = imported(tmp_path)
    session = EagerSession(load_model(tmp_path / "model"))
    features = whisper.features(tmp_path / "hf", whisper.waveforms(1))
    with pytest.raises(InputError) as caught:
        decode(session, features, defaults.overridden(options))
    assert len(caught.value.problems) == 1


# Texts


def test_texts_are_those_of_transformers(pair: Pair) -> None:
    """Samples become texts through the processor and the tokenizer of the bundle."""
    tokenizer = WhisperTokenizer.from_pretrained(pair.folder / "hf")
    signals = whisper.waveforms(8, seed=2)
    files = [wav(signal, RATE) for signal in signals]
    rounded = [np.round(signal.clip(-1, 1 - 2**-15) * 2**15).astype(np.float32) / 2**15 for signal in signals]
    features = whisper.features(pair.folder / "hf", rounded)
    banned = [*MULTILINGUAL["suppress_tokens"], *range(128, 256)]  # incomplete characters
    sets: list[dict[str, Any]] = [{"return_timestamps": True}, {}, {"suppress_tokens": [*banned, *TIMESTAMPS]}]
    for options in ({"suppress_tokens": banned} | one for one in sets):
        results = pair.bundle.generate(files, **options)
        expected = generate(pair.theirs, features, **options)
        assert [result.token_ids for result in results] == expected
        assert [result.text for result in results] == tokenizer.batch_decode(expected, skip_special_tokens=True)
    by_default = default_ids(pair.theirs, features, **options)
    assert [[*result.token_ids[3:]][: len(ids)] for result, ids in zip(results, by_default, strict=True)] == by_default
    assert "".join(pair.bundle.stream(files[0], **options)) == results[0].text


def test_scores_are_those_of_generated_texts(pair: Pair) -> None:
    """The prompt is not scored, and its language is detected."""
    audio = [(signal, RATE) for signal in whisper.waveforms(4)]
    options = {"no_repeat_ngram_size": 0, "max_new_tokens": 5, "suppress_tokens": [*range(33), *range(127, VOCAB)]}
    results = pair.bundle.generate(audio, **options)
    scores = pair.bundle.score(audio, [result.text for result in results], add_eos=False)
    assert [score.token_ids for score in scores] == [result.token_ids[3:] for result in results]
    np.testing.assert_allclose([one.log_prob for one in scores], [5 * one.score for one in results], atol=1e-4)


def test_an_engine_detects_languages_too(pair: Pair) -> None:
    """Streams begin with the prompt, which has no text."""
    files = [wav(signal, RATE) for signal in whisper.waveforms(6)]
    expected, (features,) = pair.bundle.generate(files), pair.bundle.read(files[:1])
    assert len({one.token_ids[0] for one in expected}) > 1, "all in one language"

    async def check() -> None:
        async with Engine(pair.folder / "bundle") as engine:
            answers = await asyncio.gather(*(engine.generate(file) for file in files))
            assert [answer.token_ids for (answer,) in answers] == [one.token_ids for one in expected]
            for file, one in zip(files, expected, strict=True):
                assert "".join([piece async for piece in engine.stream(file)]) == one.text
            assert [token async for token in engine.stream_ids(features)] == list(expected[0].token_ids)

    asyncio.run(check())


def test_a_server_returns_the_language_and_segments(pair: Pair) -> None:
    """The tokens between two timestamps are a segment."""
    file = wav(whisper.waveforms(1)[0], RATE)
    options = {"return_timestamps": True, "num_beams": 3}
    (expected,) = pair.bundle.generate([file], **options)
    ids = expected.token_ids

    async def ask() -> Any:
        async with serving(pair.folder / "bundle") as served:
            fields = {"response_format": "verbose_json", "num_beams": "3"}
            return await served.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", file)}, data=fields)

    found = asyncio.run(ask()).json()
    assert (found["text"], found["task"]) == (expected.text, "transcribe")
    assert ids[0] == whisper.ID[found["language"]]
    text_ids = [token for token in ids[2:] if token not in TIMESTAMPS]
    assert [token for segment in found["segments"] for token in segment["tokens"]] == text_ids
    times = [place for place, token in enumerate(ids) if token in TIMESTAMPS]
    assert pair.bundle.tokenizer
    for segment in found["segments"]:
        assert segment["text"] == pair.bundle.tokenizer.decode(segment["tokens"])
        place = next(place for place in times if list(ids[place + 1 :][: len(segment["tokens"])]) == segment["tokens"])
        assert segment["start"] == pytest.approx(0.02 * TIMESTAMPS.index(ids[place]))
        if segment["end"] is not None:
            end = ids[place + 1 + len(segment["tokens"])]
            assert segment["end"] == pytest.approx(0.02 * TIMESTAMPS.index(end))


def test_audio_longer_than_the_window_is_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match="at most 1 s"):
        pair.bundle.generate([(np.zeros(RATE + 1, np.float32), RATE)])


# Weights


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop("model.encoder.conv2.weight"), CheckpointError),
        (lambda tensors: tensors.pop("model.decoder.layers.1.encoder_attn.v_proj.weight"), CheckpointError),
        (lambda tensors: tensors.update(other=torch.ones(3, 3)), ParityError),
        (lambda tensors: tensors.update({"model.encoder.embed_positions.weight": torch.ones(49, 32)}), CheckpointError),
        (lambda tensors: tensors.update({"model.encoder.conv1.weight": torch.ones(32, 15, 3)}), CheckpointError),
        (lambda tensors: tensors.update({"model.decoder.layers.2.fc1.bias": torch.ones(48)}), CheckpointError),
    ],
)
def test_wrong_weights_are_refused(change: Callable[[Any], object], error: type[Exception], tmp_path: Path) -> None:
    path = whisper.write(tmp_path / "hf") / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(error):
        import_checkpoint(tmp_path / "hf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_bundle_verifies(pair: Pair) -> None:
    report = verify_bundle(pair.folder / "bundle", against=pair.folder / "model", config=VerifyConfig(samples=6))
    assert report.passed
