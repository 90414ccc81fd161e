"""`tfexport onnx`, `verify`, `inspect` and `doctor`, and what all commands share."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import tokenizers

import tfexport.bundle.bundle
import tfexport.errors
from tests.command import TFEXPORT, ran, run
from tests.conftest import DATES
from tfexport.bench.config import BenchConfig
from tfexport.cli import main
from tfexport.errors import ParityError, TfexportError
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.importing.config import ImportConfig
from tfexport.tensorrt.config import EngineConfig
from tfexport.verify import VerifyConfig


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    return main.commands[command].make_context(command, list(arguments)).params


@pytest.fixture(scope="session")
def verified(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Export preset:tiny through the command line; `said` beside it has what was printed."""

    def make(path: Path) -> None:
        result = ran(
            "onnx", "preset:tiny", "--output", path, "--variants", "concat", "--max-source-length", 12, "--seed", 5
        )
        path.with_name("said").write_text(json.dumps([result.stdout, result.stderr]))

    return once("verified", make)


def test_onnx_writes_a_verified_bundle_and_reports_progress_on_stderr(verified: Path) -> None:
    stdout, stderr = json.loads(verified.with_name("said").read_text())
    first, second = stdout.splitlines()
    assert first == f"{verified}: encoder-decoder, fp32"
    assert second.startswith("consistent: ")
    assert stderr.startswith("loading preset:tiny\ntracing the encoder\n")
    manifest = json.loads((verified / "manifest.json").read_text())
    assert manifest["parity"]["passed"] is True
    assert (manifest["provenance"]["status"], manifest["provenance"]["proven"]) == ("consistent", False)
    assert manifest["spec"]["max_source_length"] == 12
    assert set(manifest["graphs"]) == {"encoder", "decoder", "reorder"}


def test_options_have_the_defaults_of_the_library() -> None:
    for config, values in (
        (ImportConfig, parsed("import", "model.pt", "--output", "model")),
        (ExportConfig, parsed("onnx", "model", "--output", "bundle")),
        (EngineConfig, parsed("trt", "bundle")),
        (BenchConfig, parsed("bench", "bundle") | {"trusted_keys": ()}),
        (DecodeConfig, parsed("generate", "bundle", "text")),
        (VerifyConfig, parsed("verify", "bundle")),
    ):
        assert config(**{field.name: values[field.name] for field in fields(config)}) == config()


def test_verify_passes_for_an_exported_bundle(verified: Path) -> None:
    result = run("verify", verified, "--samples", 6, "--seed", 1, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["passed"], found["samples"], found["seed"]) == (0, True, 6, 1)
    assert found["status"] == "consistent"
    text = ran("verify", verified, "--samples", 6)
    assert text.stdout.splitlines()[-2:] == [
        "parity with the eager model: passed",
        f"consistent: {found['proof']}",
    ]


def test_verify_exits_with_2_when_the_weights_differ(verified: Path, tmp_path: Path) -> None:
    """The same configuration with other weights says something else."""
    from tfexport.nn.directory import save_model
    from tfexport.runtime.eager import load_eager_model

    model = load_eager_model(tfexport.bundle.bundle.open_bundle(verified))
    for parameter in model.parameters():
        parameter.requires_grad_(False).mul_(1.01)
    save_model(model, tmp_path / "other")
    result = ran("verify", verified, "--against", tmp_path / "other", "--samples", 4, code=2)
    assert "FAILED" in result.stdout


def test_every_error_of_the_tree_is_one_line_and_only_parity_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [value for value in vars(tfexport.errors).values() if isinstance(value, type)]
    assert ParityError in classes
    for error in (value for value in classes if issubclass(value, TfexportError)):

        def fail(error: type[TfexportError] = error) -> None:
            raise error("what, got, expected, remedy")

        monkeypatch.setattr("tfexport.doctor.diagnose", fail)
        result = run("doctor")
        assert result.exit_code == (2 if error is ParityError else 1)
        assert (result.stdout, result.stderr) == ("", "error: what, got, expected, remedy\n")


@pytest.mark.parametrize("module", ["torch", "torch._C", "onnx_ir"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("tfexport.doctor.diagnose", fail)
    result = ran("doctor", code=1)
    assert result.stderr == f"error: this needs {module}, which is not installed; pip install 'tfexport[export]'\n"


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'oops'", name="oops")

    monkeypatch.setattr("tfexport.doctor.diagnose", fail)
    assert isinstance(run("doctor").exception, ModuleNotFoundError)


def test_inspect_a_bundle(verified: Path) -> None:
    found = json.loads(run("inspect", verified, "--json").stdout)
    assert (found["kind"], found["model"], found["parity"]["passed"]) == ("bundle", "encoder-decoder", True)
    text = run("inspect", verified).stdout
    assert text.startswith(f"bundle {verified}: encoder-decoder, fp32, ")
    assert found["status"] == "consistent"
    assert f"\n  consistent: {found['proof']}\n" in text
    assert "in   cross_key.0 … .1" in text
    for entry in found["files"].values():
        assert entry["sha256"] in text


def test_inspect_shows_token_ids_and_tokenizers(verified: Path, dates_bundle: Path) -> None:
    found = json.loads(run("inspect", dates_bundle, "--json").stdout)
    library = tokenizers.Tokenizer.from_file(str(dates_bundle / "tokenizer.json"))
    ids = {name: number for name, number in found["spec"]["tokens"].items() if number is not None}
    shown = found["tokenizers"]["tokenizer.json"]
    assert shown["tokens"] == {name: library.id_to_token(number) for name, number in ids.items()}
    assert shown["size"] == library.get_vocab_size()
    assert shown["model"] == type(library.model).__name__
    text = run("inspect", dates_bundle).stdout
    for name, number in ids.items():
        assert f'  {name:5}  {number}  "{shown["tokens"][name]}"\n' in text
    assert f"  tokenizer.json  {shown['model']}  {shown['size']} tokens\n" in text
    without = run("inspect", verified).stdout
    assert "Tokens\n  pad" in without
    assert "no tokenizer: input and output are token ids" in without


def test_inspect_a_graph_agrees_with_the_manifest(verified: Path) -> None:
    manifest = json.loads((verified / "manifest.json").read_text())
    for graph in manifest["graphs"].values():
        found = json.loads(run("inspect", verified / graph["file"], "--json").stdout)
        assert found["kind"] == "graph"
        assert (found["inputs"], found["outputs"]) == (graph["inputs"], graph["outputs"])
        assert found["opsets"]["ai.onnx"] == graph["opset"]
        assert found["sha256"] == manifest["files"][graph["file"]]["sha256"]
        moves_rows = graph["file"] == "reorder.onnx"
        assert found["weight_files"] == ([] if moves_rows else ["weights.safetensors"])
        assert sum(found["operators"].values()) > (0 if moves_rows else 20)


def test_inspect_a_model_agrees_with_the_weights() -> None:
    from safetensors import safe_open

    found = json.loads(run("inspect", DATES, "--json").stdout)
    written, config = json.loads((DATES / "config.json").read_text()), found["config"]
    scale = written.pop("residual_scale")  # which each side has since
    for part in ("encoder", "decoder"):  # switches that are younger than the file have their defaults
        assert (written.pop(part) | {"residual_scale": scale}).items() <= config.pop(part).items()
    assert {name: config[name] for name in written} == written
    with safe_open(DATES / "model.safetensors", "np") as weights:
        names = list(weights.keys())
        assert {t["name"]: t["shape"] for t in found["tensors"]} == {
            name: list(weights.get_tensor(name).shape) for name in names
        }
        assert found["parameters"] == sum(weights.get_tensor(name).size for name in names)
    text = run("inspect", DATES).stdout
    assert f"{found['parameters']:,} parameters, {len(names)} tensors ({len(names)} F32)" in text


def test_inspect_something_else(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no protobuf \xff")
    (tmp_path / "empty.onnx").touch()
    for name, message in [
        (".", "is something else, expected a bundle"),
        ("none", "does not exist, expected a bundle"),
        ("bad.onnx", "is not an ONNX model"),
        ("empty.onnx", "is not an ONNX model"),
    ]:
        result = run("inspect", tmp_path / name)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert message in result.stderr


def test_the_exit_status_of_doctor_depends_on_working_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfexport.doctor.run_probe", lambda backend, library: {library.device: ""})
    result = run("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["works"]) == (0, True)
    monkeypatch.setattr("tfexport.doctor.run_probe", lambda backend, library: {library.device: "does not start"})
    result = ran("doctor", code=1)
    assert "no backend works, so no bundle can run\n    → pip install 'tfexport[cpu]'" in result.stdout


def test_help_and_version_come_from_the_installed_command() -> None:
    done = subprocess.run([TFEXPORT, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "tfexport, version 0.1.0\n"
    for words in ((), ("--help",), ("-h",)):
        assert all(f"\n  {name} " in run(*words).output for name in main.commands)


def test_every_command_and_option_has_help() -> None:
    for command in main.commands.values():
        assert command.help
        assert all(p.help for p in command.params if isinstance(p, click.Option))
