"""Every block of code in the docs runs in a test, or says what it needs that the machine of the tests lacks.

A Python program runs in `test_docs.py`, the `tfexport` commands of a terminal (`$ …`) run here. Right above any other
block stands a comment: `<!-- runs: FILE::TEST -->` names the test that runs it, `<!-- needs: THING -->` what of NEEDS
is lacking. What is no code, output or an excerpt, is a block of `text`.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.test_docs import DOCS, EVERY, OTHERS, PROGRAMS, Block, blocks, same, sessions
from tfexport.cli import main
from tfexport.generation import GenerationDefaults

ALL = [*EVERY, *(block for path in OTHERS for block in blocks(path))]
NEEDS = {
    "a GPU",
    "a bucket",  # of a store of objects
    "a package index",
    "a reverse proxy",
    "a container engine",
    "a Ray cluster",
    "namespaces of its own",  # of the kernel; containers that run tests seldom may make them
    "weights of yours",
    "measurements of yours",
    "published weights",
    "other systems",  # those that benchmarks/ compares with
    "onnxruntime-web",
    "fairseq",
    "OpenNMT-py",
    "JoeyNMT",
}
LONG = {"onnx", "verify", "bench"}  # these take seconds to minutes
CODE = re.compile(r"^(\$ |tfexport |pip |python |curl |import |from \w+ import )", re.MULTILINE)


TERMINALS = [block for block in EVERY if block.language in ("", "console") and not block.mark]
FIRST = ("README.md", "alignment.md", "quantization.md")  # these make the bundles that the others use


@pytest.mark.parametrize("block", ALL, ids=[block.name for block in ALL])
def test_every_block_runs_or_says_why_it_does_not(block: Block) -> None:
    if block.mark:
        kind, what = block.mark
        if kind == "needs":
            assert what in NEEDS
        else:
            file, name = what.split("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    elif block.language == "text":
        assert not CODE.search(block.text), "code is no text: say its language, and what it needs"
    elif block.language == "python":
        assert block in PROGRAMS or block.name.startswith("README.md:")
    else:
        commands = [shlex.split(line) for line, _ in sessions(block)]
        assert block in TERMINALS, "no test runs this block: mark it"
        assert commands
        assert block.text.startswith("$ ")
        assert all(words[0] == "tfexport" and words[1] in {*main.commands} - {"serve", "trt"} for words in commands)


def test_every_fence_is_seen() -> None:
    for path in [*DOCS, *OTHERS]:
        fences = re.findall(r"^\s*(?:```|~~~)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(list(blocks(path))), path


def run(words: list[str], shown: str) -> None:
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == 0, result.stderr
    if shown:
        lines, expected = result.stdout.splitlines(), shown.splitlines()
        if "…" in expected:  # some lines are left out
            assert all(any(same(line, one) for one in lines) for line in expected if line != "…")
        else:
            assert same(result.stdout, shown), f"{shlex.join(words)} prints:\n{result.stdout}"


@pytest.mark.parametrize("name", sorted({block.name.partition(":")[0] for block in TERMINALS}))
def test_a_terminal_prints_what_is_shown(name: str, workplace: Path) -> None:
    """The commands that take no time, of a page from top to bottom."""
    for block in TERMINALS:
        if block.name.startswith(f"{name}:"):
            for line, shown in sessions(block):
                words = shlex.split(line)
                if words[1] not in LONG and not any("int4" in word for word in words):
                    run(words, shown)


@pytest.mark.slow
def test_all_terminals_print_what_is_shown(workplace: Path) -> None:
    """All commands of all pages, in one place; what they export takes the place of what is there."""
    for block in sorted(TERMINALS, key=lambda block: not block.name.startswith(FIRST)):
        for line, shown in sessions(block):
            words = shlex.split(line)
            if words[1] == "onnx":
                made = Path(words[words.index("--output") + 1])
                if made.is_symlink():
                    made.unlink()
            print(shlex.join(words), flush=True)
            run(words, shown)


def test_the_defaults_that_are_shown_are_read() -> None:
    (block,) = (block for block in EVERY if block.language == "json" and block.name.startswith("generation.md"))
    shown = json.loads(block.text)
    assert GenerationDefaults.from_dict(shown).given().keys() == shown.keys()
