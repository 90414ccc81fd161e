"""Bad input through the command line: exit code 1, one line with the remedy, nothing written and nothing lost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.conftest import DATES
from tests.tiny import VARIANTS
from tfexport._io.atomic import locked
from tfexport.bundle.bundle import open_bundle
from tfexport.cli import main
from tfexport.nn.directory import save_model

TFEXPORT = str(Path(sys.executable).with_name("tfexport"))
WEIGHTS = "model.safetensors"
PROGRESS = re.compile("(loading|tracing|writing|verifying|comparing|decoding)( |$)")
Damage = Callable[[Path], object]


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def says(code: int, stdout: str, stderr: str, *messages: str) -> None:
    """Expect exit code 1, no output and, behind lines of progress, one short line of error with every message in it."""
    *progress, error = stderr.splitlines()
    assert (code, stdout) == (1, ""), stdout + stderr
    assert all(PROGRESS.match(line) for line in progress), stderr
    assert error.startswith("error: ")
    assert error.isprintable()
    assert len(error) < 2500
    for message in messages:
        assert message in error


def refuses(result: Result, *messages: str) -> None:
    says(result.exit_code, result.stdout, result.stderr, *messages)


def content(folder: Path) -> dict[str, str]:
    """Return every path below, with the sum of what is a plain file and nothing hidden left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tiny.model(VARIANTS["post"], dtype=torch.float32), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def old(dates_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that an export is to replace."""
    (tmp_path / "out").mkdir()
    return Path(shutil.copytree(dates_bundle, tmp_path / "out" / "bundle"))


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """A model that is exported quickly."""
    one = tiny.config(encoder={"layers": 1}, decoder={"layers": 1})
    save_model(tiny.model(one, dtype=torch.float32), tmp_path / "quick")
    return tmp_path / "quick"


# ---- model directories


def config(change: Callable[[dict[str, Any]], object]) -> Damage:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        change(data)
        (folder / "config.json").write_text(json.dumps(data))

    return apply


def encoder(**changes: object) -> Damage:
    return config(lambda data: data["encoder"].update(changes))


def top(**changes: object) -> Damage:
    return config(lambda data: data.update(changes))


def write(name: str, raw: bytes | str) -> Damage:
    data = raw.encode() if isinstance(raw, str) else raw
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


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def header(shape: list[object], offsets: list[int], name: str = "a") -> Damage:
    raw = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return write(WEIGHTS, struct.pack("<Q", len(raw)) + raw + bytes(8))


def several_shapes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["out.bias"] = torch.zeros(30)
    tensors["enc.embed.weight"] = torch.zeros(31, 33)


def many_keys(data: dict[str, Any]) -> None:
    del data["d_model"]
    data.update(colour="blue", norm="batch", dropout="0.1")
    data["encoder"]["layers"] = "2"


TWICE = '{"d_model": 32, "d_model": 32}'

MODELS: dict[str, tuple[Damage, list[str]]] = {
    "keys, all at once": (
        config(many_keys),
        ["unknown key colour", "missing key d_model", "norm is 'batch'", "dropout is '0.1'", "encoder.layers is '2'"],
    ),
    "heads": (encoder(num_heads=5), ["encoder.num_heads is 5, which does not divide d_model 32; change one of them"]),
    "layers": (encoder(layers=10**9), ["layers is 1000000000, expected 1 to 1000"]),
    "width": (top(d_model=10**9), ["d_model is 1000000000, expected 1 to 10000000"]),
    "vocabulary": (top(source_vocab=10**30), ["source_vocab is 1000", "expected a whole number of 64 bits"]),
    "length": (top(max_target_length=10**12), ["max_target_length is 1000000000000, expected"]),
    "heads by the milliard": (encoder(num_heads=10**9, d_k=1, d_v=1), ["num_heads is 1000000000, expected 1 to 1000"]),
    "buckets": (top(relative_bias="t5", relative_buckets=10**12), ["relative_buckets is 1000000000000, expected"]),
    "4,000 digits": (top(d_model=int("9" * 4000)), ["d_model is 9999", "…, expected a whole number of 64 bits"]),
    "a list of 100,000": (top(d_model=[1] * 100_000), ["d_model is [1, 1, ", "…, expected a whole number"]),
    "10,000 unknown keys": (config(lambda data: data.update(dict.fromkeys(map(str, range(10_000))))), ["9980 more"]),
    "control characters": (top(**{"a\nb\x1b[31m\u202e": 1}), [r"unknown key a\nb\x1b[31m\u202e"]),
    "deep": (write("config.json", "[" * 200_000), ["config.json is not JSON", "save it again"]),
    "huge config": (huge("config.json"), ["config.json has 3221225472 bytes, the limit is"]),
    "NaN": (top(norm_eps=float("nan")), ["config.json is not JSON (NaN is no JSON number)"]),
    "beyond every float": (top(norm_eps=10**400), ["norm_eps is 1000", "expected a finite number"]),
    "a key twice": (write("config.json", TWICE), ["key d_model is given twice, expected once"]),
    "byte order mark": (write("config.json", "\ufeff{}"), ["BOM"]),
    "UTF-16": (write("config.json", "{}".encode("utf-16")), ["config.json is not JSON", "UTF-8"]),
    "a list": (write("config.json", "[]"), ["the file is [], expected an object"]),
    "config is a pipe": (fifo("config.json"), ["config.json", "is not a plain file"]),
    "config is a device": (link("config.json", "/dev/zero"), ["config.json", "is not a plain file"]),
    "weights are a pipe": (fifo(WEIGHTS), [WEIGHTS, "is not a plain file"]),
    "weights are a device": (link(WEIGHTS, "/dev/zero"), [WEIGHTS, "is not a plain file"]),
    "weights are a directory": (lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), ["is not a plain file"]),
    "weights lead in a circle": (link(WEIGHTS, WEIGHTS), ["is not a plain file"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS, "is missing"]),
    "cut weights": (lambda folder: os.truncate(folder / WEIGHTS, 50_000), [WEIGHTS, "again"]),
    "header of 2^63": (write(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), [WEIGHTS, "again"]),
    "header of 3 GB": (huge(WEIGHTS), [WEIGHTS, "again"]),
    "deep header": (write(WEIGHTS, struct.pack("<Q", 200_000) + b"[" * 200_000), [WEIGHTS, "again"]),
    "a shape in letters": (header(["x", -1], [0, 8]), [WEIGHTS, "again"]),
}
# Only reading the values can tell; `inspect` reads the header alone.
VALUES: dict[str, tuple[Damage, list[str]]] = {
    "NaN weights": (
        weights(lambda tensors: tensors["out.bias"].fill_(float("nan"))),
        ["holds NaN or infinity", "out.bias", "from before the training diverged"],
    ),
    "shapes": (weights(several_shapes), ["out.bias is [30], expected [31]", "enc.embed.weight is [31, 33], expected"]),
    "overlapping tensors": (header([2], [4, 12]), ["damaged or cut short", "again"]),
    "a shape of 2^80": (header([2**40, 2**40], [0, 8]), ["damaged or cut short", "again"]),
    "a name with a line break": (header([2], [0, 8], "a\nb"), ["missing enc.pos", "and 83 more"]),
    "tokenizer is a pipe": (fifo("tokenizer.json"), ["tokenizer.json is not a plain file"]),
    "tokenizer is a device": (link("tokenizer.json", "/dev/zero"), ["tokenizer.json is not a plain file"]),
    "tokenizer is nowhere": (link("tokenizer.json", "/no/such/file"), ["cannot read", "No such file"]),
    "huge tokenizer": (huge("tokenizer.json"), ["tokenizer.json has 3221225472 bytes, the limit is"]),
    "deep tokenizer": (write("tokenizer.json", '{"a":' * 100_000), ["is no tokenizer.json", "again"]),
    "foreign tokenizer": (
        lambda folder: shutil.copy(DATES / "tokenizer.json", folder),
        ["ids reach to", "but the model's source_vocab is 31", "use the tokenizer that the model was trained with"],
    ),
}


@pytest.mark.parametrize(
    ("command", "name"), [*((c, n) for c in ("onnx", "inspect") for n in MODELS), *(("onnx", n) for n in VALUES)]
)
def test_a_damaged_model_directory(command: str, name: str, model: Path, tmp_path: Path) -> None:
    damage, messages = (MODELS | VALUES)[name]
    damage(model)
    refuses(run(command, model, *(["--output", tmp_path / "out"] if command == "onnx" else [])), *messages)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch '{self.proof}'",)


@pytest.mark.parametrize("name", [WEIGHTS, "model.pt", "pytorch_model.bin", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "bare"])
def test_code_in_a_pickle_never_runs(name: str, is_zip: bool, model: Path, tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", model / name
    if name not in ("tokenizer.json", "config.json"):
        (model / WEIGHTS).unlink()
    torch.save({"weight": Bomb(proof)}, file, _use_new_zipfile_serialization=is_zip)
    refuses(run("onnx", model, "--output", tmp_path / "out"), name)
    result = run("inspect", model)
    assert result.exit_code == (0 if name == "tokenizer.json" else 1)
    if name == "model.pt":
        refuses(run("onnx", file, "--output", tmp_path / "out"), "convert it to safetensors")
    assert not proof.exists()
    assert not (tmp_path / "out").exists()
    # The bomb is real: whoever does unpickle it sets it off.
    torch.load(shutil.copy(file, tmp_path / "copy.pt"), weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("preset:Tiny", ["preset 'Tiny' is unknown, expected one of paper-base, paper-big, modern, tiny"]),
        ("preset:", ["expected one of"]),
        ("{tmp}/nothing", ["is not a model directory; expected one with config.json and model.safetensors"]),
        ("{tmp}/model/config.json", ["is not a model directory"]),
        ("{tmp}/empty", ["config.json is missing; model.safetensors is missing; write it with save_model"]),
        ("{tmp}/" + "x" * 300, ["File name too long"]),
        ("{tmp}/line\nbreak\u202e", [r"line\nbreak\u202e is not a model directory"]),
        ("{bundle}", ["is a bundle; expected the model directory that it was made from"]),
    ],
)
def test_what_is_no_model(source: str, messages: list[str], model: Path, dates_bundle: Path, tmp_path: Path) -> None:
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
            ["--forms", "concat,concat"],
            ["forms is concat, concat, expected concat, static, contrib, once each"],
        ),
        (["--opset", "99"], ["99 is not in the range 18<=x<=20", "onnx --help."]),
        (["--precision", "fp8"], ["'fp8' is not one of 'fp32', 'fp16', 'bf16'"]),
        (["--max-source-length", "many"], ["'many' is not a valid integer"]),
    ],
)
def test_options_of_an_export(arguments: list[str], messages: list[str], model: Path, tmp_path: Path) -> None:
    refuses(run("onnx", model, "--output", tmp_path / "out", *arguments), *messages)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- the output


def test_the_source_is_never_the_output(model: Path) -> None:
    before = content(model.parent)
    refuses(run("onnx", model, "--output", model), "exists; choose another name")
    refuses(run("onnx", model, "--output", model, "--force"), "--force replaces bundles only; choose another name")
    assert content(model.parent) == before


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/", "is the root of the file system"),
        ("/dev/null", "is a file, expected a new directory"),
        ("{tmp}/model/config.json/x", "cannot write bundle"),
        ("{tmp}/" + "x" * 300, "File name too long"),
        ("/proc/no/such", "cannot write bundle"),
    ],
)
def test_outputs_that_cannot_be(output: str, message: str, model: Path, tmp_path: Path) -> None:
    before = content(tmp_path)
    refuses(run("onnx", model, "--output", output.format(tmp=tmp_path)), message)
    assert content(tmp_path) == before


def test_two_exports_to_one_path(model: Path, old: Path) -> None:
    before = open_bundle(old)
    with locked(old):
        refuses(run("onnx", model, "--output", old, "--force"), "is being written by another process; wait")
    assert open_bundle(old) == before


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([TFEXPORT, *map(str, arguments)], **pipes | options)


def test_an_export_that_is_killed_and_the_next_one(quick: Path, old: Path) -> None:
    """SIGKILL comes when the new weights are being written."""
    before = open_bundle(old)
    arguments = ("onnx", quick, "--output", old, "--force", "--no-verify", "--forms", "concat")
    with start(*arguments) as process:
        while not list(old.parent.glob(".bundle.tmp-*/weights.safetensors")):
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert open_bundle(old) == before
    assert run("generate", old, "3. März 2026").stdout == "2026-03-03\n"
    assert len(list(old.parent.iterdir())) > 1
    assert run(*arguments).exit_code == 0
    assert open_bundle(old).sha256 != before.sha256
    assert [path.name for path in old.parent.iterdir()] == ["bundle"]


def test_no_room_for_an_export(quick: Path, old: Path) -> None:
    """A file may have 64 kB; the weights need more."""
    before = open_bundle(old)
    limit = (64 * 1024, 64 * 1024)
    with start(
        *("onnx", quick, "--output", old, "--force", "--no-verify", "--forms", "concat"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    ) as process:
        stdout, stderr = process.communicate()
    says(process.returncode, stdout, stderr, "cannot write bundle", "File too large", "free some space")
    assert open_bundle(old) == before
    assert [path.name for path in old.parent.iterdir()] == ["bundle"]


# ---- bundles


def test_a_bundle_without_its_weights(old: Path) -> None:
    (old / "weights.safetensors").unlink()
    for command in (["verify", old], ["generate", old, "x"], ["inspect", old]):
        refuses(run(*command), "weights.safetensors is missing; copy it again from its source or export it again")


@pytest.mark.parametrize("command", ["generate", "embed", "verify"])
def test_a_model_directory_is_no_bundle(command: str, model: Path) -> None:
    texts = [] if command == "verify" else ["x"]
    refuses(run(command, model, *texts), f"make one with: tfexport onnx {model} --output BUNDLE")


def test_any_name_will_do(old: Path) -> None:
    place = old.rename(old.with_name("ä b\n日本 'x'"))
    assert run("generate", place, "3. März 2026").stdout == "2026-03-03\n"
    assert run("generate", place / ".." / place.name, "3. März 2026").stdout == "2026-03-03\n"


# ---- what is missing


def test_a_backend_that_is_not_installed(
    model: Path, dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    before = content(tmp_path)
    remedy = "ort: onnxruntime is not installed; pip install 'tfexport[cpu]' (or [gpu], never both)"
    refuses(run("generate", dates_bundle, "x", "--backend", "ort"), remedy)
    refuses(run("verify", dates_bundle), remedy)
    refuses(run("onnx", model, "--output", tmp_path / "out"), remedy)
    assert content(tmp_path) == before
    assert run("generate", dates_bundle, "3. März 2026").stdout == "2026-03-03\n"  # auto takes PyTorch


# ---- texts and options of generate


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (b"", ["standard input: has no text, expected one text a line"]),
        (b"\n", ["line 1 is empty"]),
        (b"1.1.2000\n\xff\n \n\xfe", ["lines 2, 4 are not UTF-8; convert the file", "line 3 is empty"]),
        (b"1.1.2000\n" + b"1" * 1_000_000, ["text 2 has 1000000 characters, the limit is 10000; split it"]),
        (("1" * 65 + "\n").encode() * 1000, ["text 1 has 65 tokens, the limit is 64; shorten it", "and 980 more"]),
        ("\U0001f600".encode(), ["the text has no character that the vocabulary knows"]),
        (b"\x00", ["the text has no character that the vocabulary knows"]),
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
        ("--top-k 5", ["top_k is 5 but do_sample is false; set do_sample to true or leave top_k out"]),
        ("--num-beams 1000000000", ["num_beams is 1000000000, expected 1 to 64"]),
        ("--max-new-tokens 99999999999999999999", ["expected a whole number of 64 bits"]),
        ("--max-new-tokens 17", ["decode: max_new_tokens is 17, above the limit of 16; lower max_new_tokens to 16"]),
        ("--min-new-tokens 17", ["decode: 17 new tokens are above the limit of 16; lower min_new_tokens"]),
        ("--num-beams 2 --length-penalty 1e9", ["length_penalty is 1000000000.0, expected -10 to 10"]),
        ("--do-sample --temperature 1e308", ["temperature is 1e+308, expected 0.01 to 100"]),
        ("--forced-bos-token-id 388", ["forced_bos_token_id has 388, expected below the vocabulary of 388"]),
        ("--num-beam 2", ["No such option", "generate --help."]),
        ("--batch-size 0", ["0 is not in the range x>=1"]),
    ],
)
def test_options_of_generate(arguments: str, messages: list[str], dates_bundle: Path) -> None:
    """Whatever concerns all texts is said once, not for each."""
    result = run("generate", dates_bundle, "1.1.2000", "1.2.2000", *arguments.split())
    refuses(result, *messages)
    assert all(result.stderr.count(message) == 1 for message in messages)


def test_an_argument_that_is_not_unicode(dates_bundle: Path) -> None:
    with start("generate", dates_bundle, b"\xff\n".decode(errors="surrogateescape")) as process:
        stdout, stderr = process.communicate()
    says(process.returncode, stdout, stderr, r"has '\udcff' at character 0, which is not valid Unicode")


# ---- standard output


@pytest.mark.parametrize("command", [["doctor"], ["--help"], ["inspect", "{bundle}"], ["generate", "{bundle}", "x"]])
def test_an_output_that_is_full(command: list[str], dates_bundle: Path) -> None:
    arguments = [argument.format(bundle=dates_bundle) for argument in command]
    with Path("/dev/full").open("w") as full, start(*arguments, stdout=full) as process:
        _, stderr = process.communicate()
    says(process.returncode, "", stderr, "standard output cannot be written: No space left on device; redirect it")


def test_standard_output_by_its_path_is_continued(dates_bundle: Path, tmp_path: Path) -> None:
    """A shell that has redirected it to a file goes on writing there."""
    command = f"(echo before; '{TFEXPORT}' generate '{dates_bundle}' 1.1.2000 --output /dev/stdout; echo after) > said"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text() == "before\n2000-01-01\nafter\n"
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def test_no_command_shows_the_help() -> None:
    result = run()
    assert "Commands:\n" in result.output
    assert "error:" not in result.output
