"""Engines are added completely or not at all, read strictly, and chosen if they can be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bundle.made import CONTENT
from tests.tensorrt.artifact import stored
from tests.tensorrt.artifact.stored import L4, MACHINE, PLANS, TENSORRT, flip
from tests.tensorrt.cuda_double import CudaDouble
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.errors import BackendError, BundleError, EngineError
from tfexport.tensorrt import store as tensorrt_store
from tfexport.tensorrt._kernels import RuntimeCacheStore
from tfexport.tensorrt.store import add_engine, choose_engine, engine_names, open_engine

NAME = "tensorrt-rtx-static-fp32"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return stored.make(tmp_path / "bundle")


@pytest.fixture
def engine(bundle: Bundle) -> Path:
    return stored.store(bundle, stored.manifest(bundle))


def test_plans_are_loaded_on_the_chosen_gpu(bundle: Bundle, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def deserialize(plan: bytes) -> bytes:
        numbers.append(CudaDouble.current_number())
        return plan

    version = MACHINE.libraries["tensorrt-rtx"]
    log = SimpleNamespace(records=SimpleNamespace(clear=lambda: None))
    runtime = SimpleNamespace(deserialize_cuda_engine=deserialize)
    library = SimpleNamespace(target="tensorrt-rtx", version=version, listen=lambda: log, runtime=lambda log: runtime)
    monkeypatch.setattr(tensorrt_store, "this_machine", lambda number: replace(MACHINE, gpu=(None, L4)[number]))
    monkeypatch.setattr(tensorrt_store, "load_library", lambda target: library)
    monkeypatch.setattr(tensorrt_store, "Cuda", CudaDouble)
    assert tensorrt_store.load_engine(bundle, NAME, 1).plans == PLANS
    assert numbers == [1, 1, 1]
    with pytest.raises(EngineError, match="none that can be used"):
        tensorrt_store.load_engine(bundle, NAME, 0)

    class Full(CudaDouble):
        def memory(self) -> tuple[int, int]:
            self.check_current()
            return sum(map(len, PLANS.values())) - 1, 1000

    monkeypatch.setattr(tensorrt_store, "Cuda", Full)
    with pytest.raises(BackendError, match="cuda:1 has 0 of 0 MB free"):
        tensorrt_store.load_engine(bundle, NAME, 1)
    assert numbers == [1, 1, 1], "nothing is loaded that does not fit"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- adding


def test_an_engine_is_opened_as_written(bundle: Bundle, engine: Path) -> None:
    assert engine == bundle.path / "engines" / NAME
    assert engine_names(bundle.path) == [NAME]
    opened = open_engine(bundle.path, NAME)
    assert (opened.name, opened.path, opened.manifest) == (NAME, engine, stored.manifest(bundle))
    assert {name: opened.read_plan(name) for name in PLANS} == PLANS
    opened.check_plans()
    assert sorted(path.name for path in (bundle.path / "engines").iterdir()) == [NAME]


def test_an_engine_is_replaced_only_with_force(bundle: Bundle, engine: Path) -> None:
    before = contents(engine)
    exists = pytest.raises(EngineError, match="exists; replace it with --force")
    with exists, add_engine(bundle.path, NAME, force=False):
        pytest.fail("the build has begun")
    assert contents(engine) == before
    (engine / "decoder_static.plan").write_bytes(b"damaged")
    (engine / "encoder.plan").unlink()
    stored.store(bundle, stored.manifest(bundle, versions={"tfexport": "0.2.0"}), force=True)
    open_engine(bundle.path, NAME).check_plans()
    assert open_engine(bundle.path, NAME).manifest.versions == {"tfexport": "0.2.0"}
    assert [path.name for path in engine.parent.iterdir()] == [NAME]


def test_foreign_files_are_not_replaced(bundle: Bundle, engine: Path) -> None:
    (engine / "mine.plan").write_bytes(b"mine")
    with pytest.raises(EngineError, match=r"holds more than an engine: 'mine\.plan' does not belong to it; remove"):
        stored.store(bundle, stored.manifest(bundle), force=True)
    (engine / "engine.json").write_text("{")
    with pytest.raises(EngineError, match=r"is not an engine \(engine\.json is not JSON .*, so --force does"):
        stored.store(bundle, stored.manifest(bundle), force=True)
    assert (engine / "mine.plan").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["notes.txt", "1.7-NVIDIA-L4/notes.txt"])
def test_a_file_among_kernels_is_not_deleted(bundle: Bundle, engine: Path, name: str) -> None:
    path = engine / "kernels" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(EngineError, match=f"holds more than an engine: 'kernels/{name}' does not belong to it"):
        stored.store(bundle, stored.manifest(bundle), force=True)
    assert path.read_text() == "mine"


def test_an_engine_with_kernels_is_replaced(bundle: Bundle, engine: Path) -> None:
    RuntimeCacheStore(engine, {"encoder": "1" * 64}, "1.7.1.116", L4).write({"encoder": b"kernels"})
    assert (engine / "kernels").exists()
    open_engine(bundle.path, NAME).check_plans()
    stored.store(bundle, stored.manifest(bundle), force=True)
    assert not (engine / "kernels").exists(), "they belong to other plans"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_build_that_fails_leaves_nothing(bundle: Bundle, is_new: bool) -> None:
    if not is_new:
        stored.store(bundle, stored.manifest(bundle))
    before = contents(bundle.path)
    with pytest.raises(ZeroDivisionError), add_engine(bundle.path, NAME, force=True) as folder:
        (folder / "encoder.plan").write_bytes(b"half")
        _ = 1 / 0
    assert contents(bundle.path) == before
    assert (bundle.path / "engines").exists() is not is_new


def test_an_invalid_engine_is_not_published(bundle: Bundle) -> None:
    whole = stored.manifest(bundle)
    with pytest.raises(EngineError, match=r"encoder\.plan is missing"):
        stored.store(bundle, whole, {name: data for name, data in PLANS.items() if name != "encoder"})
    with pytest.raises(EngineError, match=r"'extra\.plan' is not in engine\.json"):
        stored.store(bundle, whole, {**PLANS, "extra": b"x"})
    assert not (bundle.path / "engines").exists()


def test_a_bundle_that_cannot_be_written_is_named(bundle: Bundle) -> None:
    """A plain file has the name of the folder, because root may write everywhere."""
    (bundle.path / "engines").write_text("in the way")
    with pytest.raises(BundleError, match=r"cannot write engine .*; make the bundle writable"):
        stored.store(bundle, stored.manifest(bundle))


# ---- opening


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / "encoder.plan", 5), "encoder.plan has 5 bytes, expected 12"),
        (lambda f: (f / "encoder.plan").unlink(), "encoder.plan is missing"),
        (lambda f: (f / "other.plan").touch(), "'other.plan' is not in engine.json"),
        (lambda f: (f / "engine.json").unlink(), "engine.json is missing"),
        (lambda f: link(f / "encoder.plan"), "'encoder.plan' is a symbolic link"),
        (lambda f: link(f / "engine.json"), "'engine.json' is a symbolic link"),
        (link, "is not a directory"),
    ],
)
def test_a_damaged_engine_is_refused(
    bundle: Bundle, engine: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(engine)
    with pytest.raises(EngineError) as caught:
        open_engine(bundle.path, NAME)
    assert message in str(caught.value)
    assert str(engine) in str(caught.value)
    assert open_bundle(bundle.path) == bundle


def test_a_flipped_byte_is_found_when_a_plan_is_read(bundle: Bundle, engine: Path) -> None:
    flip(engine / "decoder_static.plan")
    opened = open_engine(bundle.path, NAME)
    with pytest.raises(EngineError, match=r"decoder_static\.plan was changed \(its sha256 differs\); copy it again"):
        opened.read_plan("decoder_static")
    with pytest.raises(EngineError, match=r"decoder_static\.plan was changed"):
        opened.check_plans()
    assert opened.read_plan("encoder") == PLANS["encoder"]


def test_a_link_created_later_is_not_followed(bundle: Bundle, engine: Path) -> None:
    opened = open_engine(bundle.path, NAME)
    link(engine / "encoder.plan")
    with pytest.raises(EngineError, match=r"encoder\.plan cannot be read"):
        opened.read_plan("encoder")


# ---- choosing


def test_the_only_engine_that_may_be_used_is_chosen(bundle: Bundle, engine: Path) -> None:
    stored.store(bundle, stored.manifest(bundle, TENSORRT, library_version="10.1.0.27"))
    assert choose_engine(bundle, None, MACHINE).name == NAME
    assert choose_engine(bundle, NAME, MACHINE).name == NAME
    with pytest.raises(EngineError, match=r"engine tensorrt-static-fp32: tensorrt version: built with 10\.1\.0\.27"):
        choose_engine(bundle, "tensorrt-static-fp32", MACHINE)
    stored.store(bundle, stored.manifest(bundle, TENSORRT), force=True)
    with pytest.raises(EngineError, match=f"has several engines for this machine: {NAME}, tensorrt-static-fp32;"):
        choose_engine(bundle, None, MACHINE)


def test_if_no_engine_can_be_used_each_reason_is_given(bundle: Bundle, engine: Path) -> None:
    damaged = stored.store(bundle, stored.manifest(bundle, TENSORRT))
    (damaged / "encoder.plan").unlink()
    with pytest.raises(EngineError) as caught:
        choose_engine(bundle, None, replace(MACHINE, gpu=replace(L4, compute_capability="7.5")))
    text = str(caught.value)
    assert f"engine {NAME}: compute capability: built with 8.6, 8.9, here is 7.5 (NVIDIA L4)" in text
    assert "encoder.plan is missing" in text


def test_a_bundle_without_engines_names_the_build_command(bundle: Bundle) -> None:
    with pytest.raises(EngineError, match=f"has no engines; build one with: tfexport trt {bundle.path}"):
        choose_engine(bundle, None, MACHINE)


def test_a_plan_of_another_bundle_is_refused(bundle: Bundle, engine: Path, tmp_path: Path) -> None:
    other = stored.make(tmp_path / "other", {**CONTENT, "weights.safetensors": b"others"})
    shutil.copytree(engine.parent, other.path / "engines")
    with pytest.raises(EngineError, match=r"weights\.safetensors: built with sha256 .*build it again with: tfexport"):
        choose_engine(other, NAME, MACHINE)
