"""README and docs are right: programs and commands run and print what is shown, links work.

A Python program and the `tfexport` commands of a terminal (`$ …`) run here. A comment precedes any other block:
`<!-- runs: FILE::TEST -->` names the test that runs it, and `<!-- needs: THING -->` one of NEEDS that CI lacks. A block
that is not code is of language `text`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from tests.conftest import DATES, DIGITS, ROOT
from tfexport.cli import main
from tfexport.generation import GenerationDefaults

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[egr]*/*.md"))]
OTHERS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "models/README.md")),
    DATES / "README.md",
    DIGITS / "README.md",
]
MARK = re.compile(r"<!-- (needs|runs): (.+) -->\n\Z")
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


class Block(NamedTuple):
    """A fenced block, the output shown right after it, and the mark above it."""

    name: str
    language: str
    text: str
    prints: str | None
    mark: tuple[str, str] | None


def blocks(path: Path) -> Iterator[Block]:
    source = path.read_text(encoding="utf-8")
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```\n", source, re.MULTILINE | re.DOTALL))
    for number, fence in enumerate(fences):
        behind = fences[number + 1] if number + 1 < len(fences) else None
        is_output = behind is not None and behind.start() == fence.end() and behind[1] == "text"
        line = source.count("\n", 0, fence.start()) + 1
        prints = behind[2] if behind is not None and is_output else None
        mark = MARK.search(source, 0, fence.start())
        yield Block(f"{path.name}:{line}", fence[1], fence[2], prints, (mark[1], mark[2]) if mark else None)


def sessions(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a terminal on one line, and its output."""
    for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = session.replace("\\\n", " ").partition("\n")
        yield command, shown


def table(path: Path, header: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this header."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


EVERY = [block for path in DOCS for block in blocks(path)]
PROGRAMS = [block for block in EVERY if block.language == "python" and not block.mark]
COMMANDS = [
    (block.name, line.removeprefix("$ "))
    for block in EVERY
    if block.language != "text"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith(("$ tfexport ", "tfexport "))
]
INLINE = [
    (path.name, text) for path in DOCS for text in re.findall(r"`(tfexport [^`\n]+)`", path.read_text(encoding="utf-8"))
]
ALL = [*EVERY, *(block for path in OTHERS for block in blocks(path))]
NEEDS = (
    "a GPU, a bucket, a package index, a reverse proxy, a container engine, a Ray cluster, namespaces of its own, "
    "weights of yours, measurements of yours, published weights, other systems, onnxruntime-web, fairseq, OpenNMT-py, "
    "JoeyNMT"
).split(", ")
LONG = {"onnx", "verify", "bench"}  # these take seconds to minutes
CODE = re.compile(r"^(\$ |tfexport |pip |python |curl |import |from \w+ import )", re.MULTILINE)
TERMINALS = [block for block in EVERY if block.language in ("", "console") and not block.mark]
FIRST = ("README.md", "alignment.md", "quantization.md")  # these make the bundles that the others use


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.name for block in PROGRAMS])
def test_every_program_prints_the_shown_output(block: Block, workplace: Path) -> None:
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore", ResourceWarning)  # as Python does outside of tests
        exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})
    if block.prints is not None:
        assert same(printed.getvalue(), block.prints)


def same(left: str, right: str) -> bool:
    """Return whether texts are equal except for the last digits of numbers."""
    if NUMBER.split(left) != NUMBER.split(right):
        return False
    pairs = zip(NUMBER.findall(left), NUMBER.findall(right), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=0.01, abs=1e-4) for a, b in pairs)


@pytest.mark.parametrize(("name", "line"), [*COMMANDS, *INLINE])
def test_every_command_line_parses(name: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    group = click.Context(main, **main.context_settings)
    if words[0].startswith("-"):  # such as --version
        assert words[0] in {option for p in main.get_params(group) for option in p.opts}
        return
    _, command, words = main.resolve_command(group, words)
    assert command is not None
    context = click.Context(command)
    given, rest, _ = command.make_parser(context).parse_args([w for w in words if "…" not in w and "..." not in w])
    assert not rest
    for parameter in command.params:
        if (
            parameter.name in given
            and isinstance(parameter, click.Option)
            and not isinstance(parameter.type, click.Path)
        ):
            parameter.type_cast_value(context, given[parameter.name])


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_is_in_the_docs(name: str) -> None:
    """Its options are in the command line reference, which the site generates."""
    assert f"tfexport {name}" in "\n".join(path.read_text(encoding="utf-8") for path in DOCS)
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    if "<!-- commands -->" in text:  # the site generates these headings
        headings += main.commands
    return {
        *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings),
        *re.findall(r'<a id="([\w-]+)"></a>', text),
    }


@pytest.mark.parametrize("path", [*DOCS, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            linked = path.parent / file if file else path
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_every_document_is_linked_from_another() -> None:
    assert set(DOCS[1:]) <= {
        (path.parent / target.partition("#")[0]).resolve() for path in DOCS for target in links(path)
    }


POINTS = table(ROOT / "docs" / "explanation" / "security.md", "point")


@pytest.mark.parametrize("row", POINTS, ids=[row[0].split()[0] for row in POINTS])
def test_every_point_names_existing_tests(row: list[str]) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[2])
    assert named
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


# ---- blocks


@pytest.mark.parametrize("block", ALL, ids=[block.name for block in ALL])
def test_every_block_runs_or_states_why_not(block: Block) -> None:
    if block.mark:
        kind, what = block.mark
        if kind == "needs":
            assert what in NEEDS
        else:
            file, name = what.split("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    elif block.language == "text":
        assert not CODE.search(block.text), "name the language of code, and what it needs"
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
    is_invalid = "\nINVALID: " in result.stdout  # of a measurement on a busy machine
    assert result.exit_code == (2 if is_invalid else 0), result.stderr
    if shown:
        lines, expected = result.stdout.splitlines(), shown.splitlines()
        if "…" in expected:  # some lines are left out
            assert all(any(same(line, one) for one in lines) for line in expected if line != "…")
        else:
            assert same(result.stdout, shown), f"{shlex.join(words)} prints:\n{result.stdout}"


@pytest.mark.parametrize("name", sorted({block.name.partition(":")[0] for block in TERMINALS}))
def test_a_terminal_block_prints_the_shown_output(name: str, workplace: Path) -> None:
    """Run the fast commands of a page from top to bottom."""
    for block in TERMINALS:
        if block.name.startswith(f"{name}:"):
            for line, shown in sessions(block):
                words = shlex.split(line)
                if words[1] not in LONG and not any("int4" in word for word in words):
                    run(words, shown)


@pytest.mark.slow
def test_all_terminal_blocks_print_the_shown_output(workplace: Path) -> None:
    """Run all commands of all pages in one directory; exports replace the prepared bundles."""
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
