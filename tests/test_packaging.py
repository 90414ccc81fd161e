"""The wheel, in an environment of its own with only the core and the cpu extra."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = ("export", "cpu", "serve", "rtx", "dev")
PIP = (sys.executable, "-m", "pip")
TEXT, ISO = "Dienstag, 3. März 2026", "2026-03-03"


def test_the_lock_has_every_pinned_package_with_checksums() -> None:
    text = (ROOT / "constraints.lock").read_text().replace("\\\n", "")
    locked = [line.lower() for line in text.splitlines() if not line.startswith("#")]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in locked)
    versions = {name: re.split("[ ;]", rest)[0] for name, _, rest in (line.partition("==") for line in locked)}
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    both = versions.keys() & pins.keys()
    assert {name: versions[name] for name in both} == {name: pins[name] for name in both}
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *(name for extra in LOCKED for name in extras[extra])]
    names = {re.split(r"[>\[]", name)[0] for name in declared}
    assert names - versions.keys() == {"torch"}


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> bytes:
    target.mkdir(exist_ok=True)
    code = f"from flit_core import buildapi; print(buildapi.build_{kind}({str(target)!r}))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (target / done.stdout.strip()).read_bytes()


@pytest.fixture(scope="session")
def wheel(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return next(once("wheel", lambda path: build("wheel", ROOT, path)).glob("*.whl"))


@pytest.fixture(scope="session")
def deployed(once: Callable[[str, Callable[[Path], object]], Path], wheel: Path) -> Path:

    def make(path: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", path)
        install = ("--python", path / "bin/python", "install", "--quiet", "--no-compile")
        run(*PIP, *install, "--constraint", ROOT / "constraints.txt", f"{wheel}[cpu]")

    return once("deployed", make) / "bin"


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_two_builds_have_the_same_bytes(kind: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tfexport", copy / "tfexport", copy_function=shutil.copy)  # with new dates
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    assert build(kind, ROOT, tmp_path / "a") == build(kind, copy, tmp_path / "b")


def test_the_sdist_holds_what_the_wheel_is_built_of(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(build("sdist", ROOT, tmp_path))) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        code = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == code | {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


def test_the_wheel_holds_only_the_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        licensed = any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    expected = {"tfexport/py.typed", "tfexport/runtime/ort/int8_products.onnx"}
    for pattern in ("**/*.py", "importing/layout/layouts/*.yaml", "serve/page/*"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / "tfexport").glob(pattern)}
        assert files
        expected |= files
    assert found == expected
    assert licensed


def test_the_command_works_without_torch_and_onnx(deployed: Path, tmp_path: Path) -> None:
    listed = {row["name"] for row in json.loads(run(*PIP, "--python", deployed / "python", "list", "--format", "json"))}
    assert not listed & {"torch", "onnx", "onnxscript", "onnx-ir", "safetensors", "transformers"}
    for module in ("torch", "onnx"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        run(deployed / "python", "-c", code)
    assert "Commands:" in run(deployed / "tfexport", "--help")
    found = json.loads(run(deployed / "tfexport", "doctor", "--json"))
    assert [(b["name"], b["device"], b["problem"]) for b in found["backends"]] == [("ort", "cpu", "")]
    assert found["problems"] == []


def test_a_bundle_generates_without_torch_and_onnx(deployed: Path, dates_bundle: Path) -> None:
    assert run(deployed / "tfexport", "generate", dates_bundle, TEXT, "--num-beams", "4") == f"{ISO}\n"
    code = f"import tfexport; print(tfexport.load({str(dates_bundle)!r}).generate([{TEXT!r}])[0].text)"
    assert run(deployed / "python", "-P", "-c", code) == f"{ISO}\n"
    assert "encoder-decoder, fp32" in run(deployed / "tfexport", "inspect", dates_bundle)


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["onnx", "preset:tiny", "--output", "{tmp}/out"], "torch, which is not installed"),
        (["trt", "{bundle}"], "onnx, which is not installed"),
        (["inspect", "{bundle}/encoder.onnx"], "needs the onnx package"),
        (["verify", "{bundle}"], "torch, which is not installed"),
    ],
)
def test_commands_that_need_the_export_extra_name_it(
    deployed: Path, dates_bundle: Path, tmp_path: Path, arguments: list[str], needs: str
) -> None:
    command = [argument.format(tmp=tmp_path, bundle=dates_bundle) for argument in arguments]
    done = subprocess.run([deployed / "tfexport", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")
    assert needs in done.stderr
    assert "pip install 'tfexport[export]'" in done.stderr
