"""Bundles are written completely or not at all, and open as they were made."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tfexport
from tests.bundle.made import CONFIG, CONTENT, FACTS, GRAPHS, SPEC, cannot_create, fill, graph, make, refused, siblings
from tfexport._io import atomic
from tfexport.bundle import bundle as bundles
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.manifest import Draft
from tfexport.contract import GraphEntry, encoder_graph
from tfexport.errors import BundleError


def test_an_existing_output_is_refused_before_any_work(bundle: Path) -> None:
    cannot_create(bundle, "exists; choose another name, or replace it with --force")
    (bundle.parent / "empty").mkdir()
    cannot_create(bundle.parent / "empty", "exists")
    assert siblings(bundle) == ["empty"]


def test_force_replaces_a_damaged_bundle_and_an_empty_directory(bundle: Path) -> None:
    (bundle / "encoder.onnx").unlink()
    (bundle / "decoder.onnx").write_bytes(b"damaged")
    make(bundle, force=True)
    (bundle.parent / "empty").mkdir()
    make(bundle.parent / "empty", force=True)


def test_links_to_a_bundle_are_followed(bundle: Path) -> None:
    (bundle.parent / "current").symlink_to("bundle")
    after = make(bundle.parent / "current", CONTENT | {"weights.safetensors": b"new"}, force=True)
    assert (bundle.parent / "current").is_symlink()
    assert after.path == bundle
    assert open_bundle(bundle) == open_bundle(bundle.parent / "current") == after


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: None,
        lambda manifest: "{}",
        lambda manifest: "not JSON",
        lambda manifest: '{"format_version": 1, "files": {"thesis.tex": {}}}',
        lambda manifest: manifest.replace('"encoder.onnx"', '"thesis.tex"'),
        lambda manifest: manifest.replace('"format_version": 1', '"format_version": 99'),
    ],
)
def test_force_replaces_only_bundles(bundle: Path, change: Callable[[str], str | None]) -> None:
    """Only a manifest that tfexport wrote may name files to delete."""
    (bundle / "thesis.tex").write_text("years of work")
    manifest = change((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").unlink()
    if manifest is not None:
        (bundle / "manifest.json").write_text(manifest)
    cannot_create(bundle, "is not a bundle; --force replaces only bundles; choose another name or remove", force=True)
    assert (bundle / "thesis.tex").read_text() == "years of work"
    assert siblings(bundle) == []


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    cannot_create(tmp_path / "file", "is a file, expected a new directory", force=True)
    cannot_create(tmp_path / "file" / "below", "cannot write bundle", force=True)
    cannot_create(Path("/"), "is the root of the file system", force=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_failure_keeps_the_former_bundle_and_leaves_nothing(bundle: Path) -> None:
    before = open_bundle(bundle)
    with pytest.raises(ZeroDivisionError), create_bundle(bundle, force=True) as builder:
        fill(builder, {**CONTENT, "weights.safetensors": b"new"})
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), create_bundle(bundle.parent / "new") as builder:
        fill(builder)
        raise KeyboardInterrupt
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_an_unfinished_or_spoiled_bundle_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="was not finished"), create_bundle(tmp_path / "bundle"):
        pass
    with pytest.raises(BundleError, match=r"encoder\.onnx was changed"), create_bundle(tmp_path / "bundle") as builder:
        fill(builder)
        (builder.path / "encoder.onnx").write_bytes(CONTENT["encoder.onnx"][::-1])
    with pytest.raises(BundleError, match="'link' is a symbolic link"), create_bundle(tmp_path / "bundle") as builder:
        (builder.path / "link").symlink_to("/etc/passwd")
        fill(builder)
    content = {name: data for name, data in CONTENT.items() if name != "encoder.onnx"}
    with pytest.raises(BundleError, match=r"graphs\.encoder is 'encoder\.onnx', which is not among"):
        make(tmp_path / "bundle", content)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writers_succeed_or_report_why_not(tmp_path: Path) -> None:
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


def test_other_errors_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), create_bundle(tmp_path / "bundle"):
        (tmp_path / "model.safetensors").read_bytes()
    error = pytest.raises(BundleError, match=r"cannot write bundle .*: No such file")
    with error, create_bundle(tmp_path / "bundle") as builder:
        (builder.path / "missing" / "file").write_bytes(b"")


# ---- a full disk, no permission


def test_a_full_disk_is_one_line(bundle: Path) -> None:
    before = open_bundle(bundle)
    error = pytest.raises(BundleError, match="No space left on device; free some space or choose another output")
    with error, create_bundle(bundle, force=True) as builder:
        fill(builder)
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")
    assert open_bundle(bundle) == before
    assert siblings(bundle) == []


def test_a_bundle_that_cannot_be_read_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "encoder.onnx")

    monkeypatch.setattr(bundles, "file_problems", denied)
    refused(bundle, f"cannot read bundle {bundle}: Permission denied (encoder.onnx); check its permissions")


# ---- other writers


def test_what_a_killed_writer_left_is_no_bundle(tmp_path: Path) -> None:
    """tests/fuzz/test_faults.py kills one at every call."""
    target, left = tmp_path / "bundle", tmp_path / ".bundle.tmp-0123456789abcdef"
    make(left)
    refused(target, "there is no bundle")
    make(target)
    assert siblings(target) == []


def test_temporary_files_of_other_writers_and_names_stay(bundle: Path) -> None:
    others = [".bundle.tmp-mine", ".bundle2.tmp-0123456789abcdef", ".bundle.tmp-0123456789abcdeg"]
    for name in others:
        (bundle.parent / name).mkdir()
    with create_bundle(bundle.parent / "living") as living:
        fill(living)
        make(bundle, force=True)
        assert living.path.exists()
    assert siblings(bundle) == sorted([*others, "living"])


def test_a_reader_reports_a_writer_and_does_not_wait(bundle: Path) -> None:
    shutil.move(bundle, bundle.with_name(".bundle.old-0123456789abcdef"))
    with atomic.locked(bundle):
        refused(bundle, "is being written by another process")
    open_bundle(bundle)


# ---- opening


def test_a_bundle_opens_as_it_was_made(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.path == bundle.resolve()
    assert opened.sha256 == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert {name: opened.file(name).read_bytes() for name in opened.manifest.files} == CONTENT
    manifest = opened.manifest
    assert (manifest.format_version, manifest.kind) == (1, "encoder-decoder")
    assert (manifest.spec, manifest.config, manifest.graphs) == (SPEC, CONFIG, GRAPHS)
    assert (manifest.versions, manifest.parity) == (FACTS["versions"], FACTS["parity"])
    assert manifest.files["encoder.onnx"].sha256 == hashlib.sha256(CONTENT["encoder.onnx"]).hexdigest()
    assert siblings(bundle) == []


def test_an_encoder_only_bundle_of_a_user_s_module(tmp_path: Path) -> None:
    spec = replace(SPEC, vocab=0, layers=0, heads=0, head_dim=0, value_dim=0, max_target_length=0)
    graphs = {"encoder": GraphEntry.of("encoder.onnx", 18, encoder_graph(spec))}
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, {"encoder.onnx": graph(graphs["encoder"])}, spec=spec, config=None, graphs=graphs, parity=None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.kind, manifest.config, manifest.parity, manifest.graphs) == ("encoder", None, None, graphs)


def test_a_staged_bundle_opens_before_it_is_published(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, parity=None)
        assert open_bundle(builder.path).manifest.parity is None
        (builder.path / "more.txt").write_text("more")
        builder.finish(Draft(**FACTS))
    assert open_bundle(tmp_path / "bundle").manifest.parity == FACTS["parity"]
    assert "more.txt" in builder.bundle.manifest.files


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_load_names_changed_weights_before_anything_else(backend: str, dates_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dates_bundle, tmp_path / "dates")
    weights = copy / "weights.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # no header: neither backend could read it
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed"):
        tfexport.load(copy, backend=backend)
