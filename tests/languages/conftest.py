"""Programs of docs/languages, built by the commands of its page; skipped without their tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command import ran
from tests.conftest import DATES, ROOT
from tests.test_docs import blocks

PAGE = ROOT / "docs" / "guides" / "languages.md"
Once = Callable[[str, Callable[[Path], object]], Path]


@dataclass(frozen=True)
class Program:
    command: tuple[str, ...]

    def run(self, bundle: Path, *options: str, texts: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ORT_DYLIB_PATH": f"{os.environ.get('ONNXRUNTIME')}/lib/libonnxruntime.so"}
        command = [*self.command, str(bundle), *options]
        return subprocess.run(command, input=texts, capture_output=True, text=True, timeout=300, env=environment)

    def answers(self, bundle: Path, texts: list[str], *options: str) -> list[dict[str, object]]:
        done = self.run(bundle, "--json", *options, texts="".join(f"{text}\n" for text in texts))
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]


def need(*tools: str, release: bool = False) -> None:
    """Skip without a tool on the path, or without a release of ONNX Runtime."""
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)}: not on the path")
    if release and not (Path(os.environ.get("ONNXRUNTIME", "")) / "lib" / "libonnxruntime.so").exists():
        pytest.skip("ONNXRUNTIME is not a release of ONNX Runtime, with headers in include and libraries in lib")


def try_command(*words: str) -> None:
    """Skip if a command fails that needs a package index."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words[:3])}: {(done.stdout + done.stderr).strip()[-400:]}")


@pytest.fixture(scope="session")
def commands(once: Once, dates_bundle: Path) -> Callable[[str], Path]:
    """Return a function that runs the page's block of a fixture, once, and returns its folder."""

    def run(fixture: str) -> Path:
        (block,) = (one for one in blocks(PAGE) if one.mark and one.mark[1].endswith(f"::{fixture}"))

        def make(folder: Path) -> None:
            ignored = shutil.ignore_patterns("node_modules", "target", "Cargo.lock")
            shutil.copytree(ROOT / "docs" / "languages", folder / "docs" / "languages", ignore=ignored)
            (folder / "build").mkdir()
            (folder / "build" / "dates").symlink_to(dates_bundle)
            done = subprocess.run(["bash", "-euc", block.text], cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert block.prints is not None
            assert done.stdout.endswith(block.prints)

        return once(f"languages-{fixture}", make)

    return run


@pytest.fixture(scope="session")
def javascript(commands: Callable[[str], Path]) -> Path:
    """Return a copy of docs/languages/javascript with the packages of its lock file."""
    need("node", "npm")
    try_command("npm", "view", "onnxruntime-node", "name")
    return commands("javascript") / "docs" / "languages" / "javascript"


@pytest.fixture(scope="session")
def node(javascript: Path) -> Program:
    return Program(("node", str(javascript / "generate.mjs")))


@pytest.fixture(scope="session")
def cpp(commands: Callable[[str], Path]) -> Program:
    need("cmake", "c++", release=True)
    return Program((str(commands("cpp") / "build" / "cpp" / "generate"),))


@pytest.fixture(scope="session")
def rust(commands: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Program:
    need("cargo", release=True)
    probe = tmp_path_factory.mktemp("crates") / "rust"
    shutil.copytree(ROOT / "docs" / "languages" / "rust", probe, ignore=shutil.ignore_patterns("target", "Cargo.lock"))
    try_command("cargo", "fetch", "--manifest-path", str(probe / "Cargo.toml"))
    return Program((str(commands("rust") / "build" / "rust" / "release" / "generate"),))


@pytest.fixture(scope="session")
def dates() -> list[str]:
    """Return 240 dates that the model was not trained on, of all formats."""
    lines = (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()
    return [line.partition("\t")[0] for line in lines[:: len(lines) // 240]][:240]


def expected(bundle: Path, texts: list[str], folder: Path) -> list[dict[str, object]]:
    """Return the outputs of tfexport's command line, as the programs print them."""
    (folder / "texts").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    answers = map(json.loads, ran("generate", bundle, "--input", folder / "texts", "--json").stdout.splitlines())
    return [{name: answer[name] for name in ("text", "token_ids", "finish_reason")} for answer in answers]
