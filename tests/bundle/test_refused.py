"""Bundles with damaged or malicious files or manifests are refused in one line that lists every problem."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfexport
from tests.bundle.made import CONTENT, edit, make, refused
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.describe import inspect_path
from tfexport.errors import BundleError, ConfigError

# ---- files


@given(name=st.sampled_from(["manifest.json", *(name for name in CONTENT if CONTENT[name])]), data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_changed_byte_is_refused(shared: Path, name: str, data: st.DataObject) -> None:
    original = (shared / name).read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != original[place]))
    (shared / name).write_bytes(original[:place] + bytes([byte]) + original[place + 1 :])
    try:
        # The message for the manifest depends on the byte: a digit may make it a newer version.
        refused(shared, "bundle" if name == "manifest.json" else f"{name} was changed")
    finally:
        (shared / name).write_bytes(original)
    open_bundle(shared)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("shared") / "bundle").path


@pytest.mark.parametrize("name", ["manifest.json", *(name for name in CONTENT if CONTENT[name])])
def test_cut_anywhere_is_refused(shared: Path, name: str) -> None:
    whole = (shared / name).read_bytes()
    try:
        for size in {len(whole) * per_cent // 100 for per_cent in range(100)}:
            (shared / name).write_bytes(whole[:size])
            refused(shared, name)
    finally:
        (shared / name).write_bytes(whole)


def test_all_problems_are_named_at_once(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "decoder.onnx").write_bytes(CONTENT["decoder.onnx"][::-1])
    (bundle / "decoder_static.onnx").write_bytes(b"")
    (bundle / "notes.txt").write_text("mine")
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").symlink_to("parity.json")
    os.link(bundle / "weights.safetensors", bundle.parent / "other")
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert (caught.value.subject, caught.value.problems) == (
        f"bundle {bundle}",
        (
            "decoder.onnx was changed (its sha256 differs)",
            f"decoder_static.onnx has 0 bytes, expected {len(CONTENT['decoder_static.onnx'])}",
            "'notes.txt' is not in manifest.json",
            "'tokenizer.json' is a symbolic link, expected a plain file",
            "'weights.safetensors' is a hard link (2 names), expected a file of its own",
            "encoder.onnx is missing",
        ),
    )


def test_links_are_refused_wherever_they_lead(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(bundle / "deep", outside)
    shutil.rmtree(bundle / "deep")
    (bundle / "deep").symlink_to(outside, target_is_directory=True)
    refused(bundle, "'deep' is a symbolic link")
    (bundle / "deep").unlink()
    (bundle / "deep").mkdir()
    (bundle / "deep" / "er.bin").symlink_to(outside / "er.bin")
    refused(bundle, "'deep/er.bin' is a symbolic link")
    (bundle / "deep" / "er.bin").unlink()
    os.link(outside / "er.bin", bundle / "deep" / "er.bin")
    refused(bundle, "'deep/er.bin' is a hard link (2 names)")
    (bundle / "engines").symlink_to(tmp_path, target_is_directory=True)
    refused(bundle, "'engines' is a symbolic link")


@pytest.mark.parametrize("name", ["encoder.onnx", "manifest.json"])
def test_a_pipe_is_refused_and_does_not_block(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    refused(bundle, f"'{name}' is neither a file nor a directory")


def test_a_file_that_became_a_directory_is_refused(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "encoder.onnx").mkdir()
    refused(bundle, "encoder.onnx is a directory, expected a plain file")


# ---- manifests


def test_a_manifest_that_is_a_link_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "manifest.json", tmp_path / "manifest.json")
    (bundle / "manifest.json").symlink_to(tmp_path / "manifest.json")
    refused(bundle, "'manifest.json' is a symbolic link")
    (bundle / "manifest.json").unlink()
    os.link(tmp_path / "manifest.json", bundle / "manifest.json")
    refused(bundle, "'manifest.json' is a hard link")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/etc/passwd", "files has '/etc/passwd', expected a plain relative path inside the bundle"),
        ("../outside", "files has '../outside', expected"),
        ("deep/../../outside", "files has 'deep/../../outside', expected"),
        ("", "files has '', expected"),
        ("..\\outside", "expected a plain relative path"),
        ("C:outside", "expected a plain relative path"),
        ("nul\0byte", "expected a plain relative path"),
        ("encoder.onnx\n", "expected a plain relative path"),
        ("Manifest.JSON", "expected a plain relative path"),
        ("manifest.json.sig", "expected a plain relative path"),
        ("engines/key/plan", "expected a plain relative path"),
        ("Encoder.onnx", "files has 'encoder.onnx' and 'Encoder.onnx', which are the same file on some systems"),
    ],
)
def test_paths_that_are_not_plain_are_refused(bundle: Path, name: str, message: str) -> None:
    (bundle.parent / "outside").write_bytes(b"")
    entry = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    edit(bundle, lambda data: data["files"].update({name: entry}))
    text = refused(bundle)
    assert message in text or ("Encoder" in name and "which are the same file on some systems" in text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(kind="encoder"), "kind is 'encoder', but spec describes an encoder-decoder"),
        (lambda data: data["spec"].update(vocab=11), "spec and config describe different models"),
        (lambda data: data["parity"].update(passed=1), "parity.passed is 1, expected true or false"),
        (lambda data: data["graphs"]["encoder"].update(file="x.onnx"), "encoder is 'x.onnx', which is not among"),
        (lambda data: data["graphs"].update(x=data["graphs"].pop("encoder")), "graph 'x'; missing graph 'encoder'"),
        (
            lambda data: data["graphs"].update(decoder_contrib=data["graphs"].pop("decoder")),
            "only one of 'encoder_contrib' and 'decoder_contrib', expected both or neither",
        ),
        (lambda data: [data["graphs"].pop(f"decoder{name}") for name in ("", "_static")], "the graphs are encoder"),
        (lambda data: data.update(alignment={"layer": 1, "heads": [0, 1]}), "only one of alignment and the graph 'al"),
        (
            lambda data: data["graphs"].update(alignment=data["graphs"]["decoder"]),
            "only one of alignment and the graph 'alignment' is given, expected both or neither",
        ),
        (lambda data: data.update(alignment={"layer": 2, "heads": [0]}), "layer is 2, but the decoder has 2; give 0"),
        (lambda data: data.update(alignment={"layer": -1, "heads": []}), "a layer counted from 0 and a list of heads"),
        (
            lambda data: data["graphs"]["decoder"]["outputs"].append({"name": "x", "dtype": "bool", "shape": ["rows"]}),
            "graphs.decoder: output x bool [rows] is not in the contract",
        ),
    ],
)
def test_contradictions_are_refused(bundle: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(bundle, change)
    refused(bundle, message)


@pytest.mark.parametrize("version", [2, 10**30])
def test_a_newer_version_asks_for_an_upgrade(bundle: Path, version: int) -> None:
    (bundle / "manifest.json").write_text(json.dumps({"format_version": version, "unheard": "of"}))
    message = f"newer tfexport (format {version}, this one reads 1); upgrade with: pip install --upgrade tfexport"
    refused(bundle, message)


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, None, [1]])
def test_an_invalid_version_is_refused(bundle: Path, version: object) -> None:
    edit(bundle, lambda data: data.update(format_version=version))
    refused(bundle, f"manifest.json: format_version is {version!r}, expected 1; export it again")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "manifest.json is not JSON"),
        (b"[1]", "manifest.json is [1], expected an object"),
        (b" " * (4 * 1024 * 1024 + 1), "manifest.json has 4194305 bytes, the limit is 4194304"),
    ],
    ids=["empty", "list", "huge"],
)
def test_an_invalid_manifest_is_refused(bundle: Path, raw: bytes, message: str) -> None:
    (bundle / "manifest.json").write_bytes(raw)
    refused(bundle, message)


@pytest.mark.parametrize("path", ["a\0b", "caf\udce9", b"bundle", None, 7, True, ["bundle"], object()])
def test_invalid_paths_are_refused(path: Any) -> None:
    for call in (tfexport.load, open_bundle, inspect_path, lambda path: create_bundle(path).__enter__()):
        with pytest.raises(ConfigError, match=r"^(load: path|bundle|inspect|output) is "):
            call(path)


def test_no_bundle_at_all(tmp_path: Path) -> None:
    refused(
        tmp_path / "none", f"there is no bundle {tmp_path / 'none'}; export one with: tfexport onnx SOURCE --output"
    )
    refused(tmp_path / "none" / "deeper", "there is no bundle")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file, expected the directory of a bundle")
    refused(tmp_path / "file" / "below", "there is no bundle")
    (tmp_path / "model").mkdir()
    remedy = f"tfexport onnx {tmp_path / 'model'} --output BUNDLE"
    refused(tmp_path / "model", "is not a bundle: it has no manifest.json", remedy)
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop")
