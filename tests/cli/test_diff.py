"""`tfexport diff`: files, settings and texts of two bundles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tfexport
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.cli import main
from tfexport.diff import MAX_SHOWN

TEXTS = ["3 May 1999", "29 Ekim 1923", "12.02.1937"]


def diff(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["diff", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def said(*arguments: object) -> dict[str, Any]:
    """Return what a comparison that found something says as JSON."""
    code, printed, _ = diff(*arguments, "--json")
    found: dict[str, Any] = json.loads(printed)
    assert (code, found["same"]) == (2, False)
    return found


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def with_defaults(bundle: Path, output: Path, **defaults: Any) -> Path:
    """Copy a bundle, with defaults of generation."""
    manifest = open_bundle(bundle).manifest
    with create_bundle(output) as builder:
        for name in manifest.files:
            shutil.copyfile(bundle / name, builder.path / name)
        (builder.path / "generation.json").write_text(json.dumps(defaults), encoding="utf-8")
        builder.finish(
            spec=manifest.spec,
            config=manifest.config,
            graphs=manifest.graphs,
            versions={**manifest.versions, "tfexport": "0"},
            text=manifest.text,
        )
    return output


def test_a_copy_is_the_same(dates_bundle: Path, corpus: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dates_bundle, tmp_path / "copy")
    code, printed, _ = diff(dates_bundle, copy, "--corpus", corpus)
    assert (code, printed.count("\n")) == (0, 1)
    assert "the same in files and settings, and in what they say to 3 texts" in printed
    assert json.loads(diff(dates_bundle, copy, "--json")[1]) == {
        "same": True,
        "first": str(dates_bundle),
        "second": str(copy),
        "files": [],
        "settings": [],
        "texts": None,
    }


def test_another_precision_is_other_files_and_the_same_texts(
    dates_bundle: Path, dates_fp16: Path, corpus: Path
) -> None:
    found = said(dates_bundle, dates_fp16, "--corpus", corpus)
    hashes = [{name: entry.sha256 for name, entry in open_bundle(path).manifest.files.items()} for path in
              (dates_bundle, dates_fp16)]  # fmt: skip
    for one in found["files"]:
        assert [one["first"], one["second"]] == [side.get(one["name"]) for side in hashes]
    names = {one["name"] for one in found["files"]}
    assert {"weights.safetensors", "decoder.onnx", "decoder_contrib.onnx"} <= names
    assert "tokenizer.json" not in names
    settings = {one["name"]: (one["first"], one["second"]) for one in found["settings"]}
    assert settings["spec.precision"] == ("fp32", "fp16")
    assert settings["graphs.decoder_contrib.opset"] == (18, None)
    assert not [name for name in settings if name.startswith("config.")]
    assert found["texts"] == {"num_texts": 3, "different": []}


def test_other_defaults_are_settings_and_other_texts(dates_bundle: Path, corpus: Path, tmp_path: Path) -> None:
    other = with_defaults(dates_bundle, tmp_path / "other", max_new_tokens=4, do_sample=True)
    found = said(dates_bundle, other, "--corpus", corpus)
    settings = {one["name"]: (one["first"], one["second"]) for one in found["settings"]}
    assert settings == {
        "generation.max_new_tokens": (None, 4),
        "generation.do_sample": (None, True),
        "versions.tfexport": (tfexport.__version__, "0"),
    }
    answers = [tfexport.load(path).generate(TEXTS, do_sample=False) for path in (dates_bundle, other)]
    assert found["texts"]["different"] == [
        {"index": index, "text": text, "first": first.text, "second": second.text}
        for index, (text, first, second) in enumerate(zip(TEXTS, *answers, strict=True))
    ]
    code, printed, _ = diff(dates_bundle, other, "--corpus", corpus)
    assert code == 2
    assert "  generation.max_new_tokens  none → 4\n" in printed
    assert "Texts: 3 of 3 differ\n  text 1    3 May 1999\n    first   1999-05-03\n    second  1999\n" in printed


def test_of_many_texts_the_first_are_shown(dates_bundle: Path, tmp_path: Path) -> None:
    other = with_defaults(dates_bundle, tmp_path / "other", max_new_tokens=4)
    corpus = tmp_path / "corpus"
    corpus.write_text("3 May 1999\n" * (MAX_SHOWN + 2), encoding="utf-8")
    printed = diff(dates_bundle, other, "--corpus", corpus)[1]
    assert printed.count("    second  1999\n") == MAX_SHOWN
    assert printed.endswith("  and 2 more; --json has all\n")
    # Beams are asked for by number.
    assert len(said(dates_bundle, other, "--corpus", corpus, "--num-beams", 4)["texts"]["different"]) == MAX_SHOWN + 2


@pytest.mark.parametrize(
    ("second", "options", "problem"),
    [
        ("nothing", [], "there is no bundle"),
        ("copy", ["--corpus", "empty"], "empty"),
        ("copy", ["--corpus"], "requires an argument"),
    ],
)
def test_errors_are_one_line_and_another_code(
    dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, options: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").symlink_to(dates_bundle)
    (tmp_path / "empty").touch()
    code, printed, error = diff(dates_bundle, second, *options)
    assert (code, printed, error.count("\n")) == (1, "", 1)
    assert problem in error


def test_trusted_keys_are_asked_for_of_both(dates_bundle: Path, tmp_path: Path) -> None:
    code, _, error = diff(dates_bundle, dates_bundle, "--trusted-keys", tmp_path / "none.pub")
    assert (code, "none.pub" in error) == (1, True)
