"""The tutorial and the recipes of the cookbook work: files are written, commands run, and their output is compared."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_docs import Block, blocks, same, sessions

TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGE = ROOT / "docs" / "guides" / "cookbook.md"
PATIENCE_S = 600.0
STAYS = re.compile(r"tfexport serve |uvicorn ")
IS_UP = re.compile(r"ready after|startup complete")


def stories() -> dict[str, list[Block]]:
    """Return the blocks of the tutorial, and of each recipe by its heading."""
    source = PAGE.read_text(encoding="utf-8")
    found = {"tutorial": list(blocks(TUTORIAL))}
    headings = [(source.count("\n", 0, h.start()) + 1, h[1]) for h in re.finditer(r"^## (.+)$", source, re.MULTILINE)]
    for block in blocks(PAGE):
        line = int(block.name.rpartition(":")[2])
        found.setdefault([name for start, name in headings if start < line][-1], []).append(block)
    return found


STORIES = stories()


@contextmanager
def in_another_terminal(command: str, place: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a server until the end of the recipe; continue when it is ready."""
    with subprocess.Popen(
        ["bash", "-c", f"exec env {command}"],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            output = []
            for line in process.stdout:
                output.append(line)
                if IS_UP.search(line):
                    break
            else:
                pytest.fail(f"{command} ended:\n{''.join(output)}")
            yield
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_a_recipe_runs_as_written(name: str, tmp_path: Path) -> None:
    for folder in ("docs", "models", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # A path that is relative would mean another one in the folder of the recipe.
    paths = os.pathsep.join(str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": paths if "PYTHONPATH" in os.environ else "",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with ExitStack() as servers:
        for block in STORIES[name]:
            if block.mark is None or block.mark[0] == "needs":
                continue
            if block.language != "console":
                file = re.match(r"(?:#|//|<!--) ([\w.-]+):", block.text)
                assert file, f"{block.name} does not say which file it is"
                (tmp_path / file[1]).write_text(block.text, encoding="utf-8")
                continue
            for command, shown in sessions(block):
                here = command.replace("localhost:8000", f"localhost:{port}")
                if STAYS.search(command):
                    servers.enter_context(in_another_terminal(f"{here} --port {port}", tmp_path, environment))
                    continue
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", here],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                if shown.strip() != "…":
                    assert same(done.stdout.rstrip("\n"), shown.rstrip("\n")), f"{command} prints:\n{done.stdout}"
