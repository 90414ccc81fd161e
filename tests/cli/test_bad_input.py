"""Bad input through the command line: exit code 1, one line with the remedy, nothing written and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.command import TFEXPORT, refuses, run
from tests.conftest import DATES
from tests.nn.test_directory import Bomb
from tests.tiny import VARIANTS
from tfexport.nn.directory import save_model

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tiny.model(VARIANTS["post"], dtype=torch.float32), tmp_path / "model")
    return tmp_path / "model"


# ---- model directories


def config(change: Callable[[dict[str, Any]], object]) -> Damage:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        change(data)
        (folder / "config.json").write_text(json.dumps(data))

    return apply


def top(**changes: object) -> Damage:
    return config(lambda data: data.update(changes))


def write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def fifo(name: str) -> Damage:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def link(name: str, to: str) -> Damage:
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to(to))


def huge(name: str) -> Damage:
    """Make a file of 3 GB without a byte on the disk."""

    def apply(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(3 << 30)

    return apply


def header(shape: list[object], offsets: list[int]) -> Damage:
    raw = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return write(WEIGHTS, struct.pack("<Q", len(raw)) + raw + bytes(8))


MODELS: dict[str, tuple[Damage, list[str]]] = {
    "several keys": (
        top(colour="blue", norm="batch", d_model="32"),
        ["unknown key colour", "norm is 'batch'", "d_model is '32', expected a whole number"],
    ),
    "10,000 unknown keys": (config(lambda data: data.update(dict.fromkeys(map(str, range(10_000))))), ["9980 more"]),
    "control characters": (top(**{"a\nb\x1b[31m\u202e": 1}), [r"unknown key a\nb\x1b[31m\u202e"]),
    "deep": (write("config.json", b"[" * 200_000), ["config.json is not JSON", "save it again"]),
    "huge config": (huge("config.json"), ["config.json has 3221225472 bytes, the limit is"]),
    "config is a pipe": (fifo("config.json"), ["config.json", "is not a plain file"]),
    "config is a device": (link("config.json", "/dev/zero"), ["config.json", "is not a plain file"]),
    "weights are a pipe": (fifo(WEIGHTS), [WEIGHTS, "is not a plain file"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json", "is missing"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS, "is missing"]),
    "cut weights": (lambda folder: os.truncate(folder / WEIGHTS, 50_000), [WEIGHTS, "again"]),
    "header of 2^63": (write(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), [WEIGHTS, "again"]),
    "header of 3 GB": (huge(WEIGHTS), [WEIGHTS, "again"]),
    "deep header": (write(WEIGHTS, struct.pack("<Q", 200_000) + b"[" * 200_000), [WEIGHTS, "again"]),
}
# `inspect` does not read this far.
VALUES: dict[str, tuple[Damage, list[str]]] = {
    "overlapping tensors": (header([2], [4, 12]), ["damaged or cut short", "again"]),
    "a shape of 2^80": (header([2**40, 2**40], [0, 8]), ["damaged or cut short", "again"]),
    "tokenizer is a pipe": (fifo("tokenizer.json"), ["tokenizer.json is not a regular file"]),
    "tokenizer is nowhere": (link("tokenizer.json", "/no/such/file"), ["cannot read", "No such file"]),
    "foreign tokenizer": (
        lambda folder: shutil.copy(DATES / "tokenizer.json", folder),
        ["the largest id", "but the model's source_vocab is 31", "use the tokenizer that the model was trained with"],
    ),
}


@pytest.mark.parametrize("name", [*MODELS, *VALUES])
def test_a_damaged_model_directory(name: str, model: Path, tmp_path: Path) -> None:
    damage, messages = (MODELS | VALUES)[name]
    damage(model)
    refuses(run("onnx", model, "--output", tmp_path / "out"), *messages)
    if name in MODELS:
        refuses(run("inspect", model), *messages)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", [WEIGHTS, "model.pt", "tokenizer.json"])
def test_code_in_a_pickle_never_runs(name: str, model: Path, tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", model / name
    if name != "tokenizer.json":
        (model / WEIGHTS).unlink()
    torch.save({"weight": Bomb(proof)}, file)
    refuses(run("onnx", model, "--output", tmp_path / "out"), name)
    run("inspect", model)
    if name == "model.pt":
        refuses(run("onnx", file, "--output", tmp_path / "out"), "convert it to safetensors")
    assert not proof.exists()
    # The bomb is real: it goes off if the file is unpickled.
    torch.load(shutil.copy(file, tmp_path / "copy.pt"), weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("preset:Tiny", ["preset 'Tiny' is unknown, expected one of paper-base, "]),
        ("preset:", ["expected one of"]),
        ("{tmp}/nothing", ["is not a model directory (config.json, model.safetensors), as import writes it"]),
        ("{tmp}/model/config.json", ["is not a model directory"]),
        ("{tmp}/empty", ["config.json is missing; model.safetensors is missing; write it with save_model"]),
        ("{tmp}/" + "x" * 300, ["File name too long"]),
        ("{tmp}/line\nbreak\u202e", [r"line\nbreak\u202e is not a model directory"]),
        ("{bundle}", ["is a bundle; expected the model directory that it was made from"]),
    ],
)
def test_a_path_without_a_model_is_refused(
    source: str, messages: list[str], model: Path, dates_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = source.format(tmp=tmp_path, bundle=dates_bundle)
    refuses(run("onnx", given, "--output", tmp_path / "out"), *messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model"]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--seed", "-1", "--max-source-length", "0"], ["max_source_length is 0", "seed is -1, expected 0 or more"]),
        (["--max-source-length", "9" * 30], ["max_source_length is 9999", "expected a whole number of 64 bits"]),
        (
            ["--max-source-length", "25", "--max-target-length", "99"],
            ["max_source_length is 25, above the model's position table of 24", "max_target_length is 99"],
        ),
        (
            ["--variants", "concat,concat"],
            ["variants is concat, concat, expected at least one of concat, static, contrib, each at most once"],
        ),
        (["--opset", "99"], ["99 is not in the range 18<=x<=20", "onnx --help"]),
        (["--variants", ""], ["variants is empty"]),
        (["--precision", "bf16"], ["--no-verify"]),
    ],
)
def test_options_of_an_export(arguments: list[str], messages: list[str], model: Path, tmp_path: Path) -> None:
    refuses(run("onnx", model, "--output", tmp_path / "out", *arguments), *messages)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- the output


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_the_source_is_never_the_output(options: tuple[str, ...], model: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    refuses(run("onnx", model, "--output", model, *options), "choose another name")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


# ---- bundles


@pytest.mark.parametrize("command", ["generate", "embed", "verify"])
def test_a_model_directory_is_no_bundle(command: str, model: Path) -> None:
    texts = [] if command == "verify" else ["x"]
    refuses(run(command, model, *texts), f"export a model directory with: tfexport onnx {model} --output BUNDLE")


# ---- what is missing


def test_a_backend_that_is_not_installed(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    remedy = "ort: onnxruntime is not installed; pip install 'tfexport[cpu]' (or [gpu], never both)"
    refuses(run("generate", dates_bundle, "x", "--backend", "ort"), remedy)
    refuses(run("verify", dates_bundle), remedy)
    assert run("generate", dates_bundle, "3. März 2026").stdout == "2026-03-03\n"  # auto takes PyTorch


# ---- texts and options of generate


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (b"", ["standard input: has no text, expected one text per line"]),
        (b"\n", ["line 1 is empty"]),
        (b"1.1.2000\n\xff\n \n\xfe", ["lines 2, 4 are not UTF-8; convert the file", "line 3 is empty"]),
        (b"1.1.2000\n" + b"1" * 1_000_000, ["text 2 has 1000000 characters, the limit is 10000; split it"]),
        (("1" * 65 + "\n").encode() * 1000, ["text 1 has 65 tokens, the limit is 64; shorten it", "and 980 more"]),
        ("\U0001f600".encode(), ["the text has no character of the vocabulary"]),
        (b"\x00", ["the text has no character of the vocabulary"]),
    ],
)
def test_texts_from_a_pipe(raw: bytes, messages: list[str], dates_bundle: Path) -> None:
    refuses(run("generate", dates_bundle, stdin=raw), *messages)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            "--num-beams 2 --do-sample --temperature 0 --top-p 2 --seed -1 --max-new-tokens 3 --min-new-tokens 4",
            ["seed is -1", "temperature is 0.0", "top_p is 2.0", "do_sample with num_beams 2", "min_new_tokens is 4"],
        ),
        ("--max-new-tokens 17", ["decode: max_new_tokens is 17, above the limit of 16; lower max_new_tokens to 16"]),
        ("--min-new-tokens 17", ["decode: 17 new tokens are above the limit of 16; lower min_new_tokens"]),
        ("--forced-bos-token-id 388", ["forced_bos_token_id has 388, expected below the vocabulary of 388"]),
        ("--num-beam 2", ["No such option", "generate --help"]),
        ("--batch-size 0", ["0 is not in the range x>=1"]),
    ],
)
def test_options_of_generate(arguments: str, messages: list[str], dates_bundle: Path) -> None:
    """Whatever concerns all texts is said once, not for each."""
    result = run("generate", dates_bundle, "1.1.2000", "1.2.2000", *arguments.split())
    refuses(result, *messages)
    assert all(result.stderr.count(message) == 1 for message in messages)


def test_an_argument_that_is_not_unicode(dates_bundle: Path) -> None:
    refuses(run("generate", dates_bundle, "\udcff\n"), r"has '\udcff' at character 0, which is not valid Unicode")


# ---- standard output


@pytest.mark.parametrize("command", [["--help"], ["inspect", "{bundle}"]])
def test_an_output_that_is_full(command: list[str], dates_bundle: Path) -> None:
    words = [TFEXPORT, *(word.format(bundle=dates_bundle) for word in command)]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    refuses(done, "standard output cannot be written: No space left on device; redirect it")


def test_standard_output_given_by_path_is_appended_to(dates_bundle: Path, tmp_path: Path) -> None:
    """A shell that has redirected it to a file goes on writing there."""
    command = f"(echo before; '{TFEXPORT}' generate '{dates_bundle}' 1.1.2000 --output /dev/stdout; echo after) > said"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text() == "before\n2000-01-01\nafter\n"
    assert [path.name for path in tmp_path.iterdir()] == ["said"]
