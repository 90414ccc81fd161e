"""A model repository is complete or not there, and replaces only its own files."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import tfexport
from tests.command import ran
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BundleError, ConfigError
from tfexport.generation import DecodeConfig
from tfexport.integrations.triton._config import Settings
from tfexport.integrations.triton.repository import SEAL, write_repository
from tfexport.serve.config import Limits, ServingConfig


def write(bundles: dict[str, Path], output: Path, **options: Any) -> Path:
    """Write a repository with the defaults."""
    serving, limits = options.pop("serving", ServingConfig()), options.pop("limits", Limits())
    return write_repository(bundles, output, serving=serving, limits=limits, **options)


@pytest.fixture
def repository(dates_bundle: Path, tmp_path: Path) -> Path:
    return write({"dates": dates_bundle}, tmp_path / "models")


def read_config(path: Path) -> Any:
    """Read a config.pbtxt by the messages of Triton's own client."""
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    text_format = pytest.importorskip("google.protobuf.text_format", reason="protobuf is not installed")
    # By its path, because the package around it needs gRPC.
    file = distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(file))
    assert spec
    assert spec.loader
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    return text_format.Parse(path.read_text(encoding="utf-8"), messages.ModelConfig())


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_repository_holds_two_models_and_a_bundle_in_each(repository: Path, dates_bundle: Path) -> None:
    bundle = open_bundle(dates_bundle)
    for model in ("dates", "dates_stream"):
        assert open_bundle(repository / model / "1" / "bundle").sha256 == bundle.sha256
        compile((repository / model / "1" / "model.py").read_text(), "model.py", "exec")
    copies = {f"{model}/1/bundle/{name}" for model in ("dates", "dates_stream") for name in names(dates_bundle)}
    files = {f"{model}/{name}" for model in ("dates", "dates_stream") for name in ("config.pbtxt", "1/model.py")}
    assert names(repository) == copies | files | {SEAL}
    assert [path.name for path in repository.parent.iterdir()] == ["models"]  # and no leftover


def test_configuration_has_inputs_outputs_and_parameters(repository: Path, dates_bundle: Path) -> None:
    config, stream = (read_config(repository / model / "config.pbtxt") for model in ("dates", "dates_stream"))
    for one, name in ((config, "dates"), (stream, "dates_stream")):
        assert (one.name, one.backend, one.max_batch_size) == (name, "python", 0)
        assert one.model_transaction_policy.decoupled == (name == "dates_stream")
        assert one.parameters["bundle_sha256"].string_value == open_bundle(dates_bundle).sha256
        assert all(port.optional for port in one.input)
        assert not one.HasField("dynamic_batching")
    ports = {port.name: (port.data_type, list(port.dims)) for port in config.input}
    string, int64, fp64, boolean = 13, 9, 12, 1
    expected = {
        "text_input": (string, [-1]), "input_ids": (int64, [-1, -1]), "input_lengths": (int64, [-1]),
        "length_penalty": (fp64, [1]), "do_sample": (boolean, [1]), "suppress_tokens": (int64, [-1]),
        "stop_strings": (string, [-1]),
    }  # fmt: skip
    assert ports | expected == ports
    # No tensor can hold the values of these, so they are only parameters.
    assert set(DecodeConfig().to_dict()) - set(ports) == {"early_stopping", "bad_words_ids", "sequence_bias", "task"}
    ranks = {port.name: len(port.dims) for port in config.output}
    assert ranks == {"text_output": 2, "output_ids": 3, "output_lengths": 2, "scores": 2, "finish_reason": 2}
    dims = {port.name: list(port.dims) for port in stream.output}
    assert dims == {"text_output": [1], "output_ids": [-1], "scores": [1], "finish_reason": [1]}


def test_a_bundle_without_a_tokenizer_has_only_ids(random_bundle: Path, tmp_path: Path) -> None:
    folder = write({"random": random_bundle}, tmp_path / "models", stream=False)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["random"]
    config = read_config(folder / "random" / "config.pbtxt")
    assert "text_input" not in {port.name for port in config.input}
    assert "text_output" not in {port.name for port in config.output}


def test_settings_are_read_as_they_were_written(dates_bundle: Path, tmp_path: Path) -> None:
    serving = ServingConfig(slots=7, max_waiting=3, max_num_beams=2)
    loading = {"backend": "ort", "variant": None, "device": "cpu", "engine": "12", "threads": 2}
    folder = write({"m": dates_bundle}, tmp_path / "r", serving=serving, limits=Limits(max_timeout_s=2.5), **loading)
    config = read_config(folder / "m" / "config.pbtxt")
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    settings = Settings.read(parameters | {"EXECUTION_ENV_PATH": "/env.tar.gz"})  # which Triton reads
    assert (settings.serving, settings.limits) == (serving, Limits(max_timeout_s=2.5))
    assert settings.loading == {name: value for name, value in loading.items() if value is not None}


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({}, "bundle_sha256 is missing"),
        ({"bundle_sha256": "ab", "slot": "3"}, "unknown slot"),
        ({"bundle_sha256": "ab", "slots": "many"}, "slots is 'many', expected a whole number"),
        ({"bundle_sha256": "ab", "max_timeout_s": "NaN"}, "max_timeout_s is 'NaN', expected a number"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Settings.read(parameters)


def test_an_unchanged_repository_is_replaced(repository: Path, dates_bundle: Path) -> None:
    compiled = repository / "dates" / "1" / "__pycache__" / "model.cpython-312.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled by Triton")
    with pytest.raises(BundleError, match="exists; choose another name, or replace it with --force"):
        write({"dates": dates_bundle}, repository)
    write({"other": dates_bundle}, repository, force=True)
    assert sorted(path.name for path in repository.iterdir()) == ["other", "other_stream", SEAL]


@pytest.mark.parametrize(
    ("name", "replace", "why"),
    [
        ("theirs/config.pbtxt", lambda path: path.write_text("name: 'theirs'"), "config.pbtxt' is not part of it"),
        ("dates/config.pbtxt", lambda path: path.write_text("max_batch_size: 8"), "'dates/config.pbtxt' was changed"),
        ("dates/1/model.py", lambda path: path.symlink_to("/dev/null"), "'dates/1/model.py' is a symbolic link"),
        (SEAL, lambda path: path.write_text("{}"), "format_version is None"),
        (SEAL, lambda path: None, f"{SEAL} is missing"),
    ],
)
def test_foreign_files_are_not_replaced(
    repository: Path, dates_bundle: Path, name: str, replace: Callable[[Path], None], why: str
) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).unlink(missing_ok=True)
    replace(repository / name)
    before = names(repository)
    with pytest.raises(BundleError, match=why) as raised:
        write({"dates": dates_bundle}, repository, force=True)
    assert "move that elsewhere" in str(raised.value)
    assert names(repository) == before


def test_nothing_is_written_if_a_bundle_is_damaged(dates_bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(dates_bundle, damaged)
    content = (damaged / "weights.safetensors").read_bytes()
    (damaged / "weights.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"weights.safetensors was changed"):
        write({"first": dates_bundle, "second": damaged}, tmp_path / "models")
    with pytest.raises(ConfigError, match="two models are called a_stream"):
        write({"a": dates_bundle, "a_stream": dates_bundle}, tmp_path / "models")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_full_disk_keeps_the_old_files(repository: Path, dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, copy = (repository / SEAL).read_bytes(), shutil.copyfile

    def full(source: Path, target: Path) -> object:
        if "other_stream" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(BundleError, match=r"No space left on device .*; free some space"):
        write({"other": dates_bundle}, repository, force=True)
    assert (repository / SEAL).read_bytes() == before
    assert [path.name for path in repository.parent.iterdir()] == ["models"]


def test_a_missing_tfexport_is_reported_with_the_install_command(repository: Path) -> None:
    command = [sys.executable, "-I", "-S", repository / "dates" / "1" / "model.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "No module named 'tfexport'; install it where Triton's Python backend runs" in done.stderr
    assert f"pip install 'tfexport[cpu]=={tfexport.__version__}'" in done.stderr


def test_the_command_prints_how_to_serve(dates_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "models"
    command = ("triton", f"de={dates_bundle}", "--output", output)
    done = ran(*command, "--slots", "4", "--no-stream")
    assert f"tritonserver --model-repository {output}" in done.output
    assert 'key: "slots", value: { string_value: "4" }' in (output / "de" / "config.pbtxt").read_text()
    ran(*command, code=1)
    ran(*command, "--force")
    assert (output / "de_stream").is_dir()
