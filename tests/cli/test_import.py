"""`tfexport import` through the command line: what it writes and prints, and one line for everything that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import tfexport
from models.from_scratch.notebook_004 import Notebook004
from tests.command import ran
from tests.importing.layout.test_apply import IDENTITY, state
from tfexport.cli import main
from tfexport.importing.layout.layout import builtin_layouts, read_layout, render_layout
from tfexport.importing.reference.outputs import record_reference
from tfexport.nn.directory import load_model


def run(*words: object, code: int = 0) -> Result:
    result = ran("import", *words, code=code)
    if code:
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in result.output
    return result


def error(*words: object, code: int = 1) -> str:
    return run(*words, code=code).stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody who has notebook 004: a checkpoint and reference outputs of it."""
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    model = Notebook004().eval()
    torch.save({"model_state_dict": model.state_dict(), "epoch": 3}, folder / "model.pt")
    record_reference(
        model, Notebook004.forward, folder / "reference.safetensors", source_vocab=31, target_vocab=31, heads=6
    )
    record_reference(model, Notebook004.forward, folder / "no_heads.safetensors", source_vocab=31, target_vocab=31)
    save_file(state(), folder / "canonical.safetensors")
    (folder / "identity.yaml").write_text(render_layout(IDENTITY))
    return folder


def test_a_proven_import(own: Path, tmp_path: Path) -> None:
    result = run(own / "model.pt", "--output", tmp_path / "m", "--reference", own / "reference.safetensors")
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'm'}: encoder-decoder, layout notebook-004, proven: error ")
    assert [line for line in rest if "k.bias" in line] == [
        f"unverified: {part}.k.bias: makes no difference"
        for part in ("enc.layers.*.self", "dec.layers.*.self", "dec.layers.*.cross")
    ]
    assert "tokens pad, start, eos are not known" in rest[-1]
    assert "taken from the entry 'model_state_dict'" in result.stderr
    files = {"certificate.json", "config.json", "layout.yaml", "model.safetensors"}
    assert {path.name for path in (tmp_path / "m").iterdir()} == files
    certificate = json.loads((tmp_path / "m" / "certificate.json").read_text())
    assert (certificate["layout"], certificate["proven"], certificate["status"]) == ("notebook-004", True, "proven")
    theirs = torch.load(own / "model.pt", weights_only=True)["model_state_dict"]
    assert torch.equal(load_file(tmp_path / "m" / "model.safetensors")["out.weight"], theirs["generator.weight"])


def later_checkpoint(own: Path, path: Path) -> dict[str, Tensor]:
    weights = torch.load(own / "model.pt", weights_only=True)["model_state_dict"]
    weights["generator.weight"] *= 2
    torch.save(weights, path)
    return dict(weights)


def test_weights_other_than_those_of_the_reference_are_refused(own: Path, tmp_path: Path) -> None:
    """In one line that names both, and the layout that the reference has proven imports them."""
    words = ["--reference", own / "reference.safetensors"]
    result = run(own / "model.pt", "--output", tmp_path / "m", *words)
    assert "with the checkpoint's own weights the error is " in result.stderr
    assert "not compared" not in result.stderr
    weights = later_checkpoint(own, tmp_path / "later.pt")
    message = error(tmp_path / "later.pt", "--output", tmp_path / "n", *words, code=2)
    named = re.search(r"was recorded with .*\(sha256 (\w+)\) than later.pt has \(sha256 (\w+)\)", message)
    assert named is not None
    assert len({*named.groups()}) == 2
    assert f"1 of {len(weights)} tensors differ, generator.weight first; record again with this" in message
    assert not (tmp_path / "n").exists()
    run(tmp_path / "later.pt", "--output", tmp_path / "n", "--layout", tmp_path / "m" / "layout.yaml")
    assert torch.equal(load_file(tmp_path / "n" / "model.safetensors")["out.weight"], weights["generator.weight"])


def test_weights_are_the_same_in_every_format_and_width_that_holds_them(own: Path, tmp_path: Path) -> None:
    """A model that loads 16 bits has 32, and so has the reference."""
    half = {k: v.half() for k, v in torch.load(own / "model.pt", weights_only=True)["model_state_dict"].items()}
    model = Notebook004().eval()
    model.load_state_dict(half)
    record_reference(model, Notebook004.forward, tmp_path / "g", source_vocab=31, target_vocab=31, heads=6)
    save_file({f"module.{key}": value for key, value in half.items()}, tmp_path / "half.safetensors")
    result = run(tmp_path / "half.safetensors", "--output", tmp_path / "m", "--reference", tmp_path / "g")
    assert "not compared" not in result.stderr


def test_an_older_reference_has_no_checksums_of_weights(own: Path, tmp_path: Path) -> None:
    """The outputs of the checkpoint's own weights decide."""
    with safe_open(own / "reference.safetensors", "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name not in ("weights", "sha256")}
    save_file(load_file(own / "reference.safetensors"), tmp_path / "older", metadata=metadata)
    words = ["--reference", tmp_path / "older", "--output"]
    result = run(own / "model.pt", *words, tmp_path / "m")
    assert "older version without checksums of the weights; they were not compared" in result.stderr
    assert "with the checkpoint's own weights the error is " in result.stderr
    later_checkpoint(own, tmp_path / "later.pt")
    assert "later.pt: with these weights the error is" in error(tmp_path / "later.pt", *words, tmp_path / "n", code=2)
    assert not (tmp_path / "n").exists()


def test_a_reference_of_the_wrapped_model_and_a_checkpoint_of_it(own: Path, tmp_path: Path) -> None:
    """Lightning puts model. before every key: in the checkpoint and in the reference alike."""
    weights = torch.load(own / "model.pt", weights_only=True)["model_state_dict"]
    torch.save({"state_dict": {f"model.{key}": value for key, value in weights.items()}}, tmp_path / "a.ckpt")
    tensors = {k.replace("state.", "state.model."): v for k, v in load_file(own / "reference.safetensors").items()}
    save_file(tensors, tmp_path / "g", metadata={"heads": "6", "outputs": "logits", "baseline": "4e-9"})
    result = run(tmp_path / "a.ckpt", "--output", tmp_path / "m", "--reference", tmp_path / "g")
    assert "layout notebook-004, proven: " in result.stdout


def test_the_layout_used_imports_again(own: Path, tmp_path: Path) -> None:
    reference = own / "reference.safetensors"
    run(own / "model.pt", "--output", tmp_path / "m", "--reference", reference, "--set", "tokens.pad=3")
    used = tmp_path / "m" / "layout.yaml"
    assert read_layout(used).tokens["pad"] == 3
    run(own / "model.pt", "--output", tmp_path / "n", "--reference", reference, "--layout", used)
    for name in ("config.json", "model.safetensors", "layout.yaml"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "n" / name).read_bytes()


def test_switches_and_tokens_are_set(own: Path, tmp_path: Path) -> None:
    ids = [word for name, i in (("pad", 0), ("start", 5), ("eos", 6)) for word in ("--set", f"tokens.{name}={i}")]
    words = ["--layout", "notebook-004", "--heads", 6, *ids, "--set", "norm_eps=1e-6", "--set", "activation=gelu"]
    result = run(own / "model.pt", "--output", tmp_path / "m", *words)
    assert "layout notebook-004, unproven: " in result.stdout
    assert "the import is not proven: there are no reference outputs" in result.stderr
    config = load_model(tmp_path / "m").config
    assert (config.norm_eps, config.activation, config.tokens.start, config.tokens.eos) == (1e-6, "gelu", 5, 6)
    assert config.encoder.num_heads == 6


def test_force_replaces_only_model_directories(own: Path, tmp_path: Path) -> None:
    words = ["--layout", own / "identity.yaml", "--heads", 4]
    for _ in range(2):
        run(own / "canonical.safetensors", "--output", tmp_path / "m", *words, "--force")
    assert "exists and is not an empty" in error(own / "canonical.safetensors", "--output", tmp_path / "m", *words)
    (tmp_path / "m" / "notes.txt").write_text("mine")
    message = error(own / "canonical.safetensors", "--output", tmp_path / "m", *words, "--force")
    assert "has files that do not belong to a model directory: 'notes.txt'; move them" in message
    (tmp_path / "m" / "config.json").write_text('{"model_type": "marian"}')
    message = error(own / "canonical.safetensors", "--output", tmp_path / "m", *words, "--force")
    assert "is not a model directory" in message
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"


def test_the_output_may_be_a_link_and_no_file(own: Path, tmp_path: Path) -> None:
    words = [own / "canonical.safetensors", "--layout", own / "identity.yaml", "--heads", 4, "--force", "--output"]
    (tmp_path / "current").symlink_to("m" * 250)
    for _ in range(2):
        run(*words, tmp_path / "current")
        assert (tmp_path / "current").is_symlink()
        assert load_model(tmp_path / ("m" * 250)).config.encoder.num_heads == 4
        assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "m" * 250]
    (tmp_path / "file").write_text("mine")
    assert "file is not a model directory" in error(*words, tmp_path / "file")
    assert "cannot be written: Not a directory" in error(*words, tmp_path / "file" / "below")
    assert "File name too long" in error(*words, tmp_path / ("x" * 256))
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_reference_a_guess_must_be_accepted(own: Path, tmp_path: Path) -> None:
    words = [own / "model.pt", "--output", tmp_path / "m", "--heads", 6]
    message = error(*words)
    assert "the layout notebook-004 is a guess from names and shapes without proof" in message
    assert "--accept-unverified" in message
    assert not (tmp_path / "m").exists()
    assert "layout notebook-004, unproven: " in run(*words, "--accept-unverified").stdout


def test_a_budget_that_is_too_small_is_reported(own: Path, tmp_path: Path) -> None:
    words = ["--output", tmp_path / "m", "--reference", own / "no_heads.safetensors", "--no-builtin"]
    message = error(own / "model.pt", *words, "--search-budget", 3, code=2)
    assert re.search("tried 1 mapping with [34] candidates, the limit; raise it with --search-budget 30", message)
    assert ", proven: " in run(own / "model.pt", *words).stdout


def test_a_terminal_shows_progress(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux says so when the other side is closed
            while part := os.read(controller, 65536):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        words = ["--output", tmp_path / "m", "--reference", own / "reference.safetensors", "--no-builtin"]
        with pytest.raises(SystemExit) as end:
            main(["import", str(own / "model.pt"), *map(str, words)])
    reader.join()
    os.close(controller)
    text = b"".join(shown).decode()
    assert not end.value.code, text
    assert "searching  [" in text
    assert "certifying  [####################################]  100%" in text
    assert "taken from the entry 'model_state_dict'" in text


# Everything that is wrong


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--layout", "notebook-004"], "the number of heads is missing, and shapes do not show it; give --heads"),
        (["--layout", "notebook-004", "--heads", "7"], "num_heads is 7, which does not divide 30 rows of queries"),
        (["--layout", "./absent.yaml"], "absent.yaml: is missing"),
        (["--layout", "notebook-004", "--no-builtin"], "builtin is false, but layout is notebook-004"),
        (["--layout", "hkproj", "--heads", "6"], "layout hkproj: map 1 "),
        (["--heads", "0", "--set", "eps=1"], "num_heads is 0, expected a whole number, 1 or more"),
    ],
)
def test_wrong_input_is_reported_in_one_line(words: list[str], problem: str, own: Path, tmp_path: Path) -> None:
    given = [word.format(tmp=tmp_path) for word in words]
    assert problem in error(own / "model.pt", "--output", tmp_path / "m", *given)
    assert not (tmp_path / "m").exists()


def test_nan_weights_and_nan_outputs(own: Path, tmp_path: Path) -> None:
    weights = torch.load(own / "model.pt", weights_only=True)["model_state_dict"]
    weights["generator.bias"][3] = float("nan")
    torch.save(weights, tmp_path / "nan.pt")
    words = ["--output", tmp_path / "m", "--layout", "notebook-004", "--heads", 6]
    message = error(tmp_path / "nan.pt", *words)
    assert "generator.bias holds NaN or infinity; take a checkpoint from before the training diverged" in message
    tensors = load_file(own / "reference.safetensors")
    tensors["logits"][0, 0, 0] = float("nan")
    save_file(tensors, tmp_path / "g")
    assert "logits holds NaN or infinity" in error(own / "model.pt", *words, "--reference", tmp_path / "g")


def test_the_former_names_still_work(own: Path, tmp_path: Path) -> None:
    result = run(own / "model.pt", "--output", tmp_path / "m", "--golden", own / "reference.safetensors")
    assert "layout notebook-004, proven: " in result.stdout
    assert "--golden" not in run("--help").stdout
    from tfexport.importing.reference.golden import record

    assert record is tfexport.record_reference
    given = {"golden": own / "reference.safetensors"}
    assert tfexport.import_checkpoint(own / "model.pt", tmp_path / "n", **given).certificate.proven


def test_two_layouts_that_both_fit_by_name(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reference both are named; with one, numbers decide."""
    from dataclasses import replace

    from tfexport.importing import importer

    right = builtin_layouts()["notebook-004"]
    wrong = replace(right, name="look-alike", arch={**right.arch, "norm_place": "pre"})
    monkeypatch.setattr(importer, "builtin_layouts", lambda: {"look-alike": wrong, "notebook-004": right})
    words = [own / "model.pt", "--output", tmp_path / "m", "--heads", 6]
    message = error(*words, "--accept-unverified")
    assert "2 layouts fit by name (look-alike, notebook-004); give --layout or --reference" in message
    assert "layout notebook-004, proven: " in run(*words, "--reference", own / "reference.safetensors").stdout


# Tokenizers


def identity(own: Path) -> list[object]:
    return ["--layout", own / "identity.yaml", "--heads", 4]


def test_a_sentencepiece_model_without_the_package(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "sp.model").write_bytes(b"\x0a\x0e\xff\x00")
    words = [*identity(own), "--tokenizer", tmp_path / "sp.model"]
    message = error(own / "canonical.safetensors", "--output", tmp_path / "m", *words)
    assert "pip install sentencepiece protobuf" in message
