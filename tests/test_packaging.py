"""The wheel, in an environment of its own with only the core and the cpu extra."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
    names = {re.split(r"[>\[]", name)[0] for name in [*declared, "setuptools"]}
    assert names - versions.keys() == {"torch"}


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Build the wheel from a copy, because a build leaves files that the next one would include."""

    def make(path: Path) -> None:
        source = path.with_name("wheel-source")
        shutil.copytree(ROOT / "tfexport", source / "tfexport", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        run(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", path, source)

    return next(once("wheel", make).glob("*.whl"))


@pytest.fixture(scope="session")
def deployed(once: Callable[[str, Callable[[Path], object]], Path], wheel: Path) -> Path:

    def make(path: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", path)
        install = ("--python", path / "bin/python", "install", "--quiet", "--no-compile")
        run(*PIP, *install, "--constraint", ROOT / "constraints.txt", f"{wheel}[cpu]")

    return once("deployed", make) / "bin"


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
