"""Default decoding options of a bundle, from the model directory to the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from tests.bundle.made import reseal
from tests.command import run
from tests.conftest import DATES
from tests.importing.huggingface import published
from tests.importing.huggingface.test_generation import drawn_defaults
from tfexport import ConfigError, DecodeConfig, Model
from tfexport.errors import TfexportError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import SAMPLING_OPTIONS, GenerationDefaults
from tfexport.importing.importer import import_checkpoint

TEXT = "le 14 juillet 1989"
OPTIONS = DecodeConfig().to_dict().keys() - set(SAMPLING_OPTIONS)
SAID: dict[str, Any] = {
    "eos_token_id": [0, 11],
    "decoder_start_token_id": 5,
    "pad_token_id": 40,
    "bad_words_ids": [[40], [3, 7]],
    "forced_eos_token_id": 0,
    "max_length": 9,
    "num_beams": 3,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
}
# Token ids that the model itself has.
OF_THE_MODEL = {"pad_token_id", "decoder_start_token_id"}
VOCAB = json.loads((DATES / "tokenizer.json").read_text())["model"]["vocab"]
SOURCES = [[3, 9, 12, 0], [7, 0], [31, 4, 18, 22, 25, 0], [2, 2, 0], [17, 30, 0]]


def overridden(defaults: dict[str, Any], **options: Any) -> DecodeConfig:
    return GenerationDefaults.from_dict(defaults, subject="generation.json").overridden(options)


@pytest.mark.parametrize(
    ("defaults", "options", "expected"),
    [
        ({"num_beams": 4}, {}, {"num_beams": 4}),
        ({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}, {"num_beams": 1}, {}),
        ({"length_penalty": 2.0}, {}, {}),
        ({"length_penalty": 2.0}, {"num_beams": 2}, {"num_beams": 2, "length_penalty": 2.0}),
        ({"temperature": 0.5, "top_k": 4}, {}, {}),
        ({"temperature": 0.5}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.5}, {"do_sample": False}, {}),
        ({"max_length": 20}, {"max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_length": 20}, {"max_new_tokens": None}, {}),
        ({"min_length": 20}, {"min_new_tokens": 0}, {}),
        ({"min_new_tokens": 9}, {"max_new_tokens": 4}, {"min_new_tokens": 4, "max_new_tokens": 4}),
        ({"min_length": 9}, {"max_new_tokens": 4}, {"min_length": 9, "max_new_tokens": 4}),
        ({"forced_bos_token_id": 3, "bad_words_ids": [[4]]}, {"forced_bos_token_id": None, "bad_words_ids": []}, {}),
    ],
)
def test_given_options_override_the_defaults(defaults: Any, options: Any, expected: Any) -> None:
    assert overridden(defaults, **options) == DecodeConfig(**expected)


OWN_BEAMS = "the model's own defaults set num_beams"


@pytest.mark.parametrize(
    ("defaults", "options", "remedy"),
    [
        ({"num_beams": 4}, {"do_sample": True}, OWN_BEAMS),
        (
            {"num_beams": 4, "no_repeat_ngram_size": 2},
            {"num_return_sequences": 5},
            OWN_BEAMS,
        ),
        ({"num_beams": 4}, {"num_beams": 0}, ""),
    ],
)
def test_a_contradiction_names_the_defaults_that_cause_it(defaults: Any, options: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(defaults, **options)
    assert (caught.value.subject, caught.value.remedy) == ("decoding", remedy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import and export a published directory with defaults."""
    found = tmp_path_factory.mktemp("defaults")
    published.write(found / "hf", "opus-mt", SAID)
    import_checkpoint(found / "hf", found / "model")
    export_bundle(str(found / "model"), found / "bundle", ExportConfig(variants=("contrib",)), verify=False)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with tfexport.load(folder / "bundle", threads=1) as loaded:
        yield loaded


def theirs(folder: Path, **options: Any) -> list[list[int]]:
    ids = torch.tensor([[*source, *[40] * (6 - len(source))] for source in SOURCES])
    with torch.inference_mode():
        rows = published.load(folder / "hf").generate(input_ids=ids, attention_mask=(ids != 40).long(), **options)
    return [[token for token in row if token != 40] for row in rows[:, 1:].tolist()]


def drawn(seed: int) -> dict[str, Any]:
    options = drawn_defaults(np.random.default_rng(seed), 40, 0, 40)
    options = {name: value for name, value in options.items() if name in OPTIONS}
    if "min_new_tokens" in options:
        options.pop("min_length", None)
        options["min_new_tokens"] = min(options["min_new_tokens"], options.get("max_new_tokens", 99))
    return options


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 1},
        {"num_beams": 1, "max_new_tokens": 5},
        {"bad_words_ids": [[40]]},
        {"eos_token_id": 0, "max_new_tokens": 12},
        {"forced_eos_token_id": None, "max_length": 6},
        {"decoder_start_token_id": 40, "no_repeat_ngram_size": 1, "length_penalty": 0.5},
        *map(drawn, range(6)),
    ],
    ids=str,
)
def test_defaults_and_options_give_the_results_of_transformers(
    folder: Path, model: Model, options: dict[str, Any]
) -> None:
    expected = theirs(folder, **options)
    assert [list(best.token_ids) for (best,) in model.generate_ids(SOURCES, **options)] == expected


def test_a_configuration_replaces_all_defaults(model: Model) -> None:
    assert model.decoding(DecodeConfig(max_new_tokens=3)) == DecodeConfig(max_new_tokens=3)
    assert model.decoding(DecodeConfig(max_new_tokens=3), num_beams=2) == DecodeConfig(max_new_tokens=3, num_beams=2)
    assert model.decoding().num_beams == 3


def test_inspect_shows_the_defaults(folder: Path) -> None:
    for name in ("model", "bundle"):
        shown = run("inspect", folder / name).stdout
        assert "Generation defaults" in shown
        assert "no_repeat_ngram_size  2\n" in shown
        found = json.loads(run("inspect", folder / name, "--json").stdout)["generation"]
        assert found == {name: value for name, value in SAID.items() if name not in OF_THE_MODEL}


def with_defaults(bundle: Path, path: Path, defaults: str) -> Path:
    """Copy a bundle and give it other defaults."""
    shutil.copytree(bundle, path)
    (path / "generation.json").write_text(defaults)
    reseal(path)
    return path


def test_on_the_command_line(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = with_defaults(
        dates_bundle, tmp_path / "bundle", '{"num_beams": 3, "num_return_sequences": 2, "max_length": 6}'
    )

    def output_of(*options: str) -> list[str]:
        done = run("generate", bundle, TEXT, *options)
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    with tfexport.load(bundle, threads=1) as model:
        two = [result.text for result in model.generate([TEXT])]
    assert len(two[0]) == 5
    assert [line.split("\t")[2] for line in output_of()] == two
    assert output_of("--num-return-sequences", "1") == two[:1]
    assert output_of("--num-return-sequences", "1", "--max-length", "none", "--num-beams", "1") == ["1989-07-14"]
    assert output_of("--num-return-sequences", "1", "--max-new-tokens", "3") == ["198"]
    one = ("--num-return-sequences", "1", "--max-new-tokens", "9")
    assert output_of(*one, "--stop-strings", "x", "--stop-strings", "9-") == ["1989-"]


def test_lists_can_be_reset_on_the_command_line(dates_bundle: Path, tmp_path: Path) -> None:
    defaults = {"stop_strings": ["-"], "bad_words_ids": [[VOCAB["9"]]], "suppress_tokens": [VOCAB["8"]]}
    bundle = with_defaults(dates_bundle, tmp_path / "bundle", json.dumps(defaults))
    texts = [
        run("generate", bundle, TEXT, *options).stdout.strip()
        for options in ([], ["--bad-words-ids", "", "--suppress-tokens", "", "--stop-strings", ""])
    ]
    assert texts[0].endswith("-")
    assert not {"8", "9"} & set(texts[0])
    assert texts[1] == "1989-07-14"


def test_a_stream_uses_the_defaults(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = with_defaults(dates_bundle, tmp_path / "bundle", '{"max_length": 6, "num_beams": 2, "stop_strings": "-"}')
    with tfexport.load(bundle, threads=1) as model:
        assert "".join(model.stream(TEXT, num_beams=1)) == "1989-"
        assert "".join(model.stream(TEXT, num_beams=1, max_length=None, stop_strings=[])) == "1989-07-14"
        assert "".join(model.stream(TEXT, config=DecodeConfig())) == "1989-07-14"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ('{"num_beam": 3}', "generation.json: unknown key num_beam"),
        ('{"suppress_tokens": [9999]}', "generation.json: suppress_tokens has 9999, expected below the vocabulary"),
        ("{", "generation.json"),
    ],
)
def test_a_model_directory_is_read_strictly(defaults: str, message: str, tmp_path: Path) -> None:
    shutil.copytree(DATES, tmp_path / "model")
    (tmp_path / "model" / "generation.json").write_text(defaults)
    with pytest.raises(TfexportError) as caught:
        export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(), verify=False)
    assert message in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_a_limit_above_that_of_the_bundle_is_lowered(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = with_defaults(dates_bundle, tmp_path / "bundle", '{"max_new_tokens": 10000}')
    with tfexport.load(bundle, threads=1) as model:
        assert model.generate([TEXT])[0].text == "1989-07-14"
