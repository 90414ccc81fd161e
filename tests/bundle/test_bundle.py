"""Bundles: what opens, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfexport
from tfexport.bundle.bundle import Builder, Bundle, create_bundle, open_bundle
from tfexport.bundle.manifest import GraphEntry
from tfexport.errors import BundleError
from tfexport.files import atomic
from tfexport.models.config import StackConfig, TransformerConfig, model_spec
from tfexport.spec import TokenIds, decoder_graph, encoder_graph

CONFIG = TransformerConfig(
    d_model=8,
    source_vocab=10,
    target_vocab=10,
    max_source_length=16,
    max_target_length=16,
    encoder=StackConfig(layers=1, num_heads=2, d_ff=8, norm_place="pre", final_norm=True),
    decoder=StackConfig(layers=2, num_heads=2, d_ff=8, norm_place="pre", final_norm=True),
    tokens=TokenIds(pad=0, start=1, eos=2, unk=3),
)
SPEC = model_spec(CONFIG, "fp32")
CONTENT = {
    "encoder.onnx": b"encoder",
    "decoder.onnx": b"decoder",
    "decoder_static.onnx": b"static",
    "weights.safetensors": bytes(range(256)),
    "tokenizer.json": b"{}",
    "parity.json": b"{}",
    "deep/er.bin": b"",
}
GRAPHS = {
    "encoder": GraphEntry(file="encoder.onnx", opset=18, spec=encoder_graph(SPEC)),
    "decoder": GraphEntry(file="decoder.onnx", opset=18, spec=decoder_graph(SPEC, "concat")),
    "decoder_static": GraphEntry(file="decoder_static.onnx", opset=24, spec=decoder_graph(SPEC, "static")),
}
FACTS: dict[str, Any] = {
    "spec": SPEC,
    "config": CONFIG,
    "graphs": GRAPHS,
    "versions": {"tfexport": "0.1.0", "onnx": "1.21.0"},
    "parity": {"passed": True, "worst": 1e-6},
}


def fill(builder: Builder, content: dict[str, bytes] = CONTENT, **facts: Any) -> None:
    for name, data in content.items():
        (builder.path / name).parent.mkdir(exist_ok=True)
        (builder.path / name).write_bytes(data)
    builder.finish(**(FACTS | facts))


def make_contrib(path: Path, graphs: dict[str, GraphEntry]) -> Bundle:
    """Make a bundle with these graphs and the contrib ones."""
    contrib = {
        "encoder_contrib": GraphEntry(file="encoder_contrib.onnx", opset=18, spec=encoder_graph(SPEC)),
        "decoder_contrib": GraphEntry(file="decoder_contrib.onnx", opset=18, spec=decoder_graph(SPEC, "contrib")),
    }
    with create_bundle(path) as builder:
        fill(builder, CONTENT | {entry.file: b"contrib" for entry in contrib.values()}, graphs=graphs | contrib)
    return builder.bundle


def make(path: Path, content: dict[str, bytes] = CONTENT, *, force: bool = False) -> Bundle:
    with create_bundle(path, force=force) as builder:
        fill(builder, content)
    return builder.bundle


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and make its own sum right again, as an attacker would."""
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    data.pop("self_sha256", None)
    data["self_sha256"] = hashlib.sha256((json.dumps(data, indent=2, sort_keys=True) + "\n").encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def siblings(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir() if other != path)


def refused(path: Path, *messages: str) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    text = str(caught.value)
    assert "\n" not in text
    for message in messages:
        assert message in text
    return text


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make(tmp_path / "bundle")
    return tmp_path / "bundle"


# ---- what opens


def test_a_bundle_opens_as_it_was_made(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.path == bundle.resolve()
    assert opened.sha256 == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert {name: opened.file(name).read_bytes() for name in opened.manifest.files} == CONTENT
    manifest = opened.manifest
    assert (manifest.format_version, manifest.kind) == (1, "encoder-decoder")
    assert (manifest.spec, manifest.config, manifest.graphs) == (SPEC, CONFIG, GRAPHS)
    assert (manifest.versions, manifest.parity) == (FACTS["versions"], FACTS["parity"])
    assert manifest.files["encoder.onnx"].sha256 == hashlib.sha256(b"encoder").hexdigest()
    assert siblings(bundle) == []


def test_the_builder_hands_over_what_opening_gives(tmp_path: Path) -> None:
    assert make(tmp_path / "bundle") == open_bundle(tmp_path / "bundle")


def test_a_file_that_is_not_there_is_named(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"has no engine\.plan; it has decoder\.onnx, "):
        open_bundle(bundle).file("engine.plan")


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make(tmp_path / "one")
    second = make(tmp_path / "two", dict(reversed(CONTENT.items())))
    text = first.path.joinpath("manifest.json").read_bytes()
    assert text == second.path.joinpath("manifest.json").read_bytes()
    assert text.endswith(b"}\n")
    assert text == (json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n").encode()


def test_an_encoder_alone_and_a_foreign_module(tmp_path: Path) -> None:
    spec = replace(SPEC, vocab=0, layers=0, heads=0, head_dim=0, value_dim=0, max_target_length=0)
    graphs = {"encoder": GraphEntry(file="encoder.onnx", opset=18, spec=encoder_graph(spec))}
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, {"encoder.onnx": b"x"}, spec=spec, config=None, graphs=graphs, parity=None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.kind, manifest.config, manifest.parity, manifest.graphs) == ("encoder", None, None, graphs)


def test_the_directory_may_be_reached_through_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("bundle")
    assert open_bundle(tmp_path / "current") == open_bundle(bundle)


def test_engines_are_left_to_their_users(bundle: Path) -> None:
    (bundle / "engines" / "key").mkdir(parents=True)
    (bundle / "engines" / "key" / "plan").write_bytes(b"x")
    open_bundle(bundle)


def test_a_staged_bundle_opens_before_it_is_published(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, parity=None)
        assert open_bundle(builder.path).manifest.parity is None
        (builder.path / "more.txt").write_text("more")
        builder.finish(**FACTS)
    assert open_bundle(tmp_path / "bundle").manifest.parity == FACTS["parity"]
    assert "more.txt" in builder.bundle.manifest.files


# ---- files that were tampered with


@given(name=st.sampled_from([name for name in CONTENT if CONTENT[name]]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_of_a_file_is_refused(shared: Path, name: str, data: st.DataObject) -> None:
    _change_a_byte(shared, name, data, message=f"{name} was changed")


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_changed_byte_of_the_manifest_is_refused(shared: Path, data: st.DataObject) -> None:
    # What is said of it depends on the byte: a digit may make it a newer version.
    _change_a_byte(shared, "manifest.json", data, message="bundle")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("shared") / "bundle").path


def _change_a_byte(path: Path, name: str, data: st.DataObject, *, message: str) -> None:
    original = (path / name).read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != original[place]))
    (path / name).write_bytes(original[:place] + bytes([byte]) + original[place + 1 :])
    try:
        refused(path, message)
    finally:
        (path / name).write_bytes(original)
    open_bundle(path)


@pytest.mark.parametrize("name", [name for name in CONTENT if CONTENT[name]])
def test_cut_and_lengthened_files_are_refused(bundle: Path, name: str) -> None:
    whole = CONTENT[name]
    (bundle / name).write_bytes(whole[:-1])
    refused(bundle, f"{name} has {len(whole) - 1} bytes, expected {len(whole)}")
    (bundle / name).write_bytes(whole + b"\0")
    refused(bundle, f"{name} has {len(whole) + 1} bytes, expected {len(whole)}")


def test_everything_wrong_is_named_at_once(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "decoder.onnx").write_bytes(b"Decoder")
    (bundle / "decoder_static.onnx").write_bytes(b"")
    (bundle / "notes.txt").write_text("mine")
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").symlink_to("parity.json")
    os.link(bundle / "weights.safetensors", bundle.parent / "other")
    assert refused(bundle) == (
        f"bundle {bundle}: 'tokenizer.json' is a symbolic link, expected a plain file; "
        "'weights.safetensors' is a hard link (2 names), expected a file of its own; "
        "'notes.txt' is not in manifest.json; decoder.onnx was changed (its sha256 differs); "
        "decoder_static.onnx has 0 bytes, expected 6; encoder.onnx is missing; "
        "copy it again from its source or export it again"
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


def test_engines_may_not_be_a_link(bundle: Path, tmp_path: Path) -> None:
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


# ---- manifests that were tampered with


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
        ("deep//er.bin", "expected a plain relative path"),
        ("./encoder.onnx", "expected a plain relative path"),
        ("deep/", "expected a plain relative path"),
        ("", "files has '', expected"),
        ("..\\outside", "expected a plain relative path"),
        ("C:outside", "expected a plain relative path"),
        ("nul\0byte", "expected a plain relative path"),
        ("\udc80", "expected a plain relative path"),
        ("encoder.onnx\n", "expected a plain relative path"),
        ("é", "expected a plain relative path"),
        ("e\u0301", "expected a plain relative path"),
        ("manifest.json", "expected a plain relative path"),
        ("Manifest.JSON", "expected a plain relative path"),
        ("engines/key/plan", "expected a plain relative path"),
        ("Encoder.onnx", "files has 'encoder.onnx' and 'Encoder.onnx', one file where case does not count"),
    ],
)
def test_paths_that_are_not_plain_are_refused(bundle: Path, name: str, message: str) -> None:
    (bundle.parent / "outside").write_bytes(b"")
    entry = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    # Before or after its twin, whichever way the keys sort.
    edit(bundle, lambda data: data["files"].update({name: entry}))
    text = refused(bundle)
    assert message in text or ("Encoder" in name and "one file where case does not count" in text)


def test_every_wrong_value_is_named_at_once(bundle: Path) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["kind"] = ["decoder"]
        data["spec"]["d_model"] = "eight"
        data["spec"]["wings"] = 2
        data["config"]["encoder"]["layers"] = None
        data["graphs"]["encoder"]["opset"] = True
        data["graphs"]["encoder"]["inputs"] = {}
        data["graphs"]["decoder"]["outputs"][0]["dtype"] = "complex64"
        data["files"]["encoder.onnx"]["bytes"] = -1
        data["files"]["decoder.onnx"]["sha256"] = "00"
        data["files"]["tokenizer.json"] = None
        data["versions"] = {"onnx": 1}
        data["parity"] = "passed"
        data["extra"] = {}

    edit(bundle, spoil)
    edit(bundle, lambda data: data["graphs"]["decoder_static"].pop("file"))
    refused(
        bundle,
        "kind is ['decoder'], expected 'encoder-decoder' or 'encoder'",
        "spec: unknown key wings",
        "d_model is 'eight', expected a whole number",
        "config: encoder.layers is None, expected a whole number",
        "graphs.encoder: opset is True, expected a whole number",
        "graphs.encoder.inputs is {}, expected a list",
        "graphs.decoder.outputs[0]: dtype is 'complex64', expected",
        "graphs.decoder_static: missing key file",
        "files.encoder.onnx: file: bytes is -1, expected 0 or more",
        "files.decoder.onnx: file: sha256 is '00', expected 64 hexadecimal digits",
        "files.tokenizer.json: the file is None, expected an object",
        "versions.onnx is 1, expected a text",
        "parity is 'passed', expected an object",
        "unknown key 'extra'",
        "; export it again",
    )


@pytest.mark.parametrize("key", ["kind", "spec", "config", "graphs", "files", "versions", "parity"])
def test_a_missing_key_is_named(bundle: Path, key: str) -> None:
    edit(bundle, lambda data: data.pop(key))
    refused(bundle, f"manifest.json: missing key {key}; export it again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(kind="encoder"), "kind is 'encoder', but spec describes an encoder-decoder"),
        (lambda data: data["spec"].update(vocab=11), "spec and config describe different models"),
        (lambda data: data["parity"].update(passed=1), "parity.passed is 1, expected true or false"),
        (
            lambda data: data["graphs"]["encoder"].update(file="x.onnx"),
            "graphs.encoder is 'x.onnx', which is not among",
        ),
        (
            lambda data: data["graphs"].update(x=data["graphs"].pop("encoder")),
            "unknown graph 'x'; missing graph 'encoder'",
        ),
        (
            lambda data: data["graphs"].update(decoder_contrib=data["graphs"].pop("decoder")),
            "of 'encoder_contrib' and 'decoder_contrib' there is only one, expected both or none",
        ),
        (
            lambda data: [data["graphs"].pop(name) for name in ("decoder", "decoder_static")],
            "but the graphs are encoder",
        ),
    ],
)
def test_contradictions_are_refused(bundle: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(bundle, change)
    refused(bundle, message)


@pytest.mark.parametrize("version", [2, 10**30])
def test_a_newer_version_asks_for_an_upgrade(bundle: Path, version: int) -> None:
    (bundle / "manifest.json").write_text(json.dumps({"format_version": version, "unheard": "of"}))
    refused(
        bundle,
        f"made by a newer tfexport (format {version}, this one reads 1); upgrade with: pip install --upgrade tfexport",
    )


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, None, [1]])
def test_no_version_at_all_is_refused(bundle: Path, version: object) -> None:
    edit(bundle, lambda data: data.update(format_version=version))
    refused(bundle, f"manifest.json: format_version is {version!r}, expected 1; export it again")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "manifest.json is not JSON"),
        (b"format_version: 1", "manifest.json is not JSON"),
        (b"[1]", "manifest.json is [1], expected an object"),
        (b"null", "manifest.json is None, expected an object"),
        (b'{"format_version": 1, "format_version": 1}', "key format_version is given twice"),
        (b'{"format_version": 1, "files": {"a": 1, "b": 2, "a": 3}}', "key a is given twice"),
        (b'{"format_version": NaN}', "NaN is no JSON number"),
        (b'{"format_version": -Infinity}', "-Infinity is no JSON number"),
        (b'{"format_version": "\xff"}', "manifest.json is not JSON ('utf-8' codec"),
        (b"\xef\xbb\xbf{}", "manifest.json is not JSON"),
        (b"[" * 100_000, "manifest.json is not JSON"),
        (b'{"format_version": ' + b"9" * 5_000 + b"}", "manifest.json is not JSON"),
        (b" " * (4 * 1024 * 1024 + 1), "manifest.json has 4194305 bytes, the limit is 4194304"),
    ],
    ids=[
        "empty",
        "yaml",
        "list",
        "null",
        "twice",
        "twice inside",
        "NaN",
        "Infinity",
        "bytes",
        "mark",
        "deep",
        "long",
        "huge",
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused(bundle: Path, raw: bytes, message: str) -> None:
    (bundle / "manifest.json").write_bytes(raw)
    refused(bundle, message)


@pytest.mark.parametrize("depth", range(100, 1000, 30))
def test_a_deep_manifest_is_refused_at_any_depth(bundle: Path, depth: int) -> None:
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"worst": 1e-06', '"worst": ' + "[" * depth + "]" * depth))
    refused(bundle, "manifest.json")


def test_white_space_in_the_manifest_counts(bundle: Path) -> None:
    data = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(data))
    refused(bundle, "manifest.json was changed")


def test_no_bundle_at_all(tmp_path: Path) -> None:
    refused(tmp_path / "none", f"there is no bundle {tmp_path / 'none'}; make one with: tfexport onnx SOURCE --output")
    refused(tmp_path / "none" / "deeper", "there is no bundle")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file, expected the directory of a bundle")
    refused(tmp_path / "file" / "below", "there is no bundle")
    (tmp_path / "model").mkdir()
    refused(
        tmp_path / "model",
        "is no bundle, it has no manifest.json",
        f"tfexport onnx {tmp_path / 'model'} --output BUNDLE",
    )
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop")


# ---- writing


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert make(tmp_path / "a" / "b" / "c").path == tmp_path / "a" / "b" / "c"


def test_an_existing_output_is_refused_before_any_work(bundle: Path) -> None:
    with (
        pytest.raises(BundleError, match="exists; choose another name, or replace it with --force"),
        create_bundle(bundle),
    ):
        pytest.fail("the block must not run")
    (bundle.parent / "empty").mkdir()
    with pytest.raises(BundleError, match="exists"), create_bundle(bundle.parent / "empty"):
        pytest.fail("the block must not run")
    assert siblings(bundle) == ["empty"]


def test_force_replaces_a_bundle_and_its_engines(bundle: Path) -> None:
    before = open_bundle(bundle)
    (bundle / "engines").mkdir()
    (bundle / "engines" / "plan").write_bytes(b"x")
    after = make(bundle, CONTENT | {"weights.safetensors": b"new"}, force=True)
    assert after.sha256 != before.sha256
    assert open_bundle(bundle) == after
    assert not (bundle / "engines").exists()
    assert siblings(bundle) == []


def test_force_replaces_a_damaged_bundle_and_an_empty_directory(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "decoder.onnx").write_bytes(b"damaged")
    make(bundle, force=True)
    (bundle.parent / "empty").mkdir()
    make(bundle.parent / "empty", force=True)


def test_force_follows_a_link(bundle: Path) -> None:
    (bundle.parent / "current").symlink_to("bundle")
    after = make(bundle.parent / "current", CONTENT | {"weights.safetensors": b"new"}, force=True)
    assert (bundle.parent / "current").is_symlink()
    assert after.path == bundle
    assert open_bundle(bundle) == after


def test_force_deletes_nothing_but_bundles(bundle: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    for manifest in (
        None,
        "{}",
        '{"name": "a web page"}',
        '{"files": {}}',
        "not JSON",
        '{"format_version": 1, "files": []}',
    ):
        if manifest is not None:
            (home / "manifest.json").write_text(manifest)
        with (
            pytest.raises(BundleError, match="is no bundle; --force replaces bundles only"),
            create_bundle(home, force=True),
        ):
            pytest.fail("the block must not run")
    (bundle / "deep" / "notes.txt").write_text("mine")
    with (
        pytest.raises(BundleError, match=r"holds more than a bundle: 'deep/notes\.txt' is not part of the bundle"),
        create_bundle(bundle, force=True),
    ):
        pytest.fail("the block must not run")
    assert (home / "thesis.tex").read_text() == "years of work"
    assert (bundle / "deep" / "notes.txt").read_text() == "mine"
    assert siblings(bundle) == ["home"]


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output, message in (
        (tmp_path / "file", "is a file, expected a new directory"),
        (tmp_path / "file" / "below", "cannot write bundle"),
        (Path("/"), "is the root of the file system"),
    ):
        with pytest.raises(BundleError, match=message), create_bundle(output, force=True):
            pytest.fail("the block must not run")
    assert (tmp_path / "file").read_text() == "x"


def test_a_failure_leaves_the_former_bundle_and_nothing_else(bundle: Path) -> None:
    before = open_bundle(bundle)
    with pytest.raises(ZeroDivisionError), create_bundle(bundle, force=True) as builder:
        fill(builder, {**CONTENT, "weights.safetensors": b"new"})
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), create_bundle(bundle.parent / "new") as builder:
        fill(builder)
        raise KeyboardInterrupt
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_a_failing_rename_puts_the_former_bundle_back(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_bundle(bundle)
    with (
        pytest.raises(BundleError, match=r"cannot write bundle .*: Directory not empty"),
        create_bundle(bundle, force=True) as builder,
    ):
        fill(builder)
        rename = os.rename

        def intrude(source: Path, target: Path) -> None:
            if Path(target) == bundle and Path(source) == builder.path:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
            rename(source, target)

        monkeypatch.setattr(os, "rename", intrude)
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_an_unfinished_or_spoiled_bundle_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="was not finished"), create_bundle(tmp_path / "bundle"):
        pass
    with pytest.raises(BundleError, match=r"encoder\.onnx was changed"), create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        (builder.path / "encoder.onnx").write_bytes(b"Encoder")
    with pytest.raises(BundleError, match="'link' is a symbolic link"), create_bundle(tmp_path / "bundle") as builder:
        (builder.path / "link").symlink_to("/etc/passwd")
        fill(builder)
    with (
        pytest.raises(BundleError, match=r"graphs\.encoder is 'encoder\.onnx', which is not among"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        fill(builder, {name: data for name, data in CONTENT.items() if name != "encoder.onnx"})
    assert list(tmp_path.iterdir()) == []


def test_two_writers_exclude_one_another_until_one_is_done(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        with pytest.raises(BundleError, match="being written by another process"), create_bundle(tmp_path / "bundle"):
            pytest.fail("the block must not run")
        make(tmp_path / "other")
        assert builder.path.exists()
    open_bundle(tmp_path / "bundle")
    make(tmp_path / "bundle", force=True)


def test_of_many_writers_at_once_each_succeeds_or_says_why(tmp_path: Path) -> None:
    target, outcomes = tmp_path / "bundle", []
    make(target)

    def write(i: int) -> None:
        try:
            outcomes.append(make(target, CONTENT | {"weights.safetensors": bytes([i])}, force=True).sha256)
        except BundleError as error:
            assert "being written" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_bundle(target).sha256 in outcomes
    assert siblings(target) == []


def test_an_error_of_somebody_else_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), create_bundle(tmp_path / "bundle"):
        (tmp_path / "model.safetensors").read_bytes()
    with (
        pytest.raises(BundleError, match=r"cannot write bundle .*: No such file"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        (builder.path / "missing" / "file").write_bytes(b"")


# ---- a full disk, no permission


def test_a_full_disk_is_one_line(bundle: Path) -> None:
    before = open_bundle(bundle)
    with (
        pytest.raises(BundleError, match="No space left on device; free some space or choose another output"),
        create_bundle(bundle, force=True) as builder,
    ):
        fill(builder)
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_a_file_above_the_limit_of_the_system_is_one_line(bundle: Path) -> None:
    before = open_bundle(bundle)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            pytest.raises(BundleError, match="File too large; free some space"),
            create_bundle(bundle, force=True) as builder,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            (builder.path / "weights.safetensors").write_bytes(bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Take the right to write; root has it always, and so becomes nobody for a while."""
    is_root = os.geteuid() == 0
    folder.chmod(0o555)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_no_permission_is_one_line(bundle: Path) -> None:
    before = open_bundle(bundle)
    with without_permission(bundle.parent):
        for output in (bundle.parent / "new", bundle):
            with (
                pytest.raises(BundleError, match=r"cannot write bundle .*: Permission denied"),
                create_bundle(output, force=True),
            ):
                pytest.fail("the block must not run")
    (bundle / "encoder.onnx").chmod(0)
    with without_permission(bundle.parent):
        refused(bundle)
    (bundle / "encoder.onnx").chmod(0o644)
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


# ---- killed


def run_and_die(program: str, *arguments: Path) -> None:
    """Run Python that must end by SIGKILL."""
    prelude = """
        import os, signal, sys
        from pathlib import Path
        from tests.bundle.test_bundle import CONTENT, fill, make
        from tfexport.bundle.bundle import create_bundle
        output = Path(sys.argv[1])
        def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(program)
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == -signal.SIGKILL, run.stderr


@pytest.mark.parametrize("exists", [False, True])
def test_killed_while_writing(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "bundle"
    before = make(target) if exists else None
    run_and_die(
        """
        with create_bundle(output, force=True) as builder:
            fill(builder, CONTENT | {"weights.safetensors": b"half"})
            die()
        """,
        target,
    )
    assert re.fullmatch(r"\.bundle\.lock \.bundle\.tmp-[0-9a-f]{16}", " ".join(siblings(target)))
    if before:
        assert open_bundle(target) == before
    else:
        refused(target, "there is no bundle")
    make(target, force=True)
    assert siblings(target) == []


def replace_and_die_at_rename(target: Path, count: int) -> None:
    run_and_die(
        f"""
        rename, calls = os.rename, []
        def counted(*names):
            calls.append(names)
            die() if len(calls) == {count} else rename(*names)
        os.rename = counted
        make(output, CONTENT | {{"weights.safetensors": b"new"}}, force=True)
        """,
        target,
    )


def test_killed_between_the_renames_opening_puts_it_back(bundle: Path) -> None:
    before = open_bundle(bundle)
    replace_and_die_at_rename(bundle, 2)
    assert not bundle.exists()
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_killed_between_the_renames_writing_puts_it_back(bundle: Path) -> None:
    before = open_bundle(bundle)
    replace_and_die_at_rename(bundle, 2)
    with pytest.raises(BundleError, match="exists"), create_bundle(bundle):
        pytest.fail("the block must not run")
    assert open_bundle(bundle) == before
    replace_and_die_at_rename(bundle, 2)
    with pytest.raises(ZeroDivisionError), create_bundle(bundle, force=True):
        raise ZeroDivisionError
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_killed_before_the_renames_nothing_has_changed(bundle: Path) -> None:
    before = open_bundle(bundle)
    replace_and_die_at_rename(bundle, 1)
    assert open_bundle(bundle) == before
    make(bundle, force=True)
    assert siblings(bundle) == []


def test_killed_while_the_former_is_deleted(bundle: Path) -> None:
    run_and_die(
        """
        import shutil
        shutil.rmtree = die
        make(output, CONTENT | {"weights.safetensors": b"new"}, force=True)
        """,
        bundle,
    )
    assert open_bundle(bundle).file("weights.safetensors").read_bytes() == b"new"
    assert any(".old-" in name for name in siblings(bundle))
    make(bundle, force=True)
    assert siblings(bundle) == []


def test_leftovers_of_the_living_and_of_other_names_stay(bundle: Path) -> None:
    others = [".bundle.tmp-mine", ".bundle2.tmp-0123456789abcdef", ".bundle.tmp-0123456789abcdeg"]
    for name in others:
        (bundle.parent / name).mkdir()
    with create_bundle(bundle.parent / "living") as living:
        fill(living)
        make(bundle, force=True)
        assert living.path.exists()
    assert siblings(bundle) == sorted([*others, "living"])


def test_a_reader_waits_for_no_writer_but_says_that_there_is_one(bundle: Path) -> None:
    shutil.move(bundle, bundle.with_name(".bundle.old-0123456789abcdef"))
    with atomic.locked(bundle):
        refused(bundle, "is being written by another process")
    open_bundle(bundle)


def test_the_manifest_needs_a_verdict(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match=r"parity\.passed is None, expected true or false"),
        create_bundle(tmp_path / "bundle") as builder,
    ):
        fill(builder, parity={})
    assert siblings(tmp_path / "bundle") == []


# ---- what `load` checks while it builds a session


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_load_refuses_weights_that_were_changed(backend: str, dates_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "dates"
    shutil.copytree(dates_bundle, copy)
    with (copy / "weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed"):
        tfexport.load(copy, backend=backend)


def test_load_names_changed_weights_before_what_else_is_wrong(dates_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "dates"
    shutil.copytree(dates_bundle, copy)
    weights = copy / "weights.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # no header: neither backend could read it
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed"):
        tfexport.load(copy, backend="eager")
