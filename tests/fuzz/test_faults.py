"""Every call of the file system fails once, is the last before kill -9, or is where SIGTERM or Ctrl-C comes.

After each: the old or the new, never half of either; files of others are there; and the next run leaves nothing behind.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models

from tests.bundle.made import CONTENT, make
from tests.fuzz.faults.inject import Injector, Outcome
from tests.tensorrt.artifact import stored
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.tensorrt.artifact.store import engine_names

# What a call can do to the disk; a kill before any other is a kill before the next of these.
CHANGING = (
    "open to create", "open64 to create", "openat to create", "openat64 to create", "fopen", "fopen64",
    "write", "writev", "pwrite", "pwrite64", "sendfile", "sendfile64", "copy_file_range", "ftruncate", "ftruncate64",
    "fsync", "rename", "unlink", "unlinkat", "mkdir", "rmdir", "chmod", "fchmod", "utimensat", "flock",
)  # fmt: skip
OFTEN, SELDOM = ("EIO", "SIGKILL"), ("ENOSPC", "EACCES", "SIGTERM", "SIGINT")
EXIT = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
RTX = ("--target", "tensorrt-rtx", "--compute-capability", "8.9", "--max-batch", "2")
# How many places of each command are tried, or "all" (hours), and which.
PLACES, SEED = os.environ.get("FAULT_PLACES", "60"), int(os.environ.get("FUZZ_SEED", "0"))
Content = dict[str, str]


def content(folder: Path) -> Content:
    """Return the sum of every file below, and a dash for every directory."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        for path in paths
    }


def bundle_content(path: Path) -> Content:
    """Return what a bundle has that opens, without leftovers of a writer in engines/."""
    opened = open_bundle(path)
    engine_names(opened.path)
    return {name: sum_ for name, sum_ in content(path).items() if "/." not in name}


def model_content(path: Path) -> Content:
    from tfexport.nn.directory import load_model

    load_model(path)
    return content(path)


@dataclass(frozen=True)
class Scenario:
    """A command that replaces something.

    Attributes:
        target: that it replaces, in its folder.
        arguments: of the command line; {} is the folder.
        read: checks what lies at the target as a reader would, and returns its content.
    """

    target: str
    arguments: tuple[str, ...]
    read: Callable[[Path], Content]

    def words(self, folder: Path) -> list[str]:
        return [word.format(folder) for word in self.arguments]


SCENARIOS = {
    "export": Scenario(
        "out/bundle",
        ("onnx", "{}/new", "--output", "{}/out/bundle", "--forms", "static", "--no-verify", "--force"),
        bundle_content,
    ),
    "import": Scenario(
        "out/model",
        (
            *("import", "{}/weights", "--layout", "{}/identity.yaml", "--heads", "4", "--tokenizer", "{}/words.json"),
            *("--output", "{}/out/model", "--force"),
        ),
        model_content,
    ),
    "tokenizer": Scenario("out/bundle", ("tokenizer", "{}/out/bundle", "--source-suffix", "2"), bundle_content),
    "trt": Scenario("out/bundle", ("trt", "{}/out/bundle", *RTX, "--force"), bundle_content),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a bundle of another with an engine and kernels, and files of somebody else."""
    from safetensors.torch import save_file

    from tests import tiny
    from tests.importing.layout.test_layout import IDENTITY, state
    from tfexport.export import export_bundle
    from tfexport.export.config import ExportConfig
    from tfexport.importing.layout.layout import render_layout
    from tfexport.nn.directory import save_model

    home = tmp_path_factory.mktemp("home").resolve()
    (home / "words.json").write_bytes(words(tiny.VOCAB))
    for seed, name in enumerate(("out/model", "new")):
        model = tiny.model(tiny.VARIANTS["post"], seed=seed)
        save_model(model.float(), home / name, home / "words.json")
    save_file(state(), home / "weights")
    (home / "identity.yaml").write_text(render_layout(IDENTITY))
    bundle = export_bundle(
        str(home / "out" / "model"), home / "out" / "bundle", ExportConfig(forms=("static",)), verify=False
    )
    add_more(bundle)
    return home


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a bundle alone, made without PyTorch."""
    home = tmp_path_factory.mktemp("small").resolve()
    add_more(make(home / "out" / "bundle", CONTENT | {"tokenizer.json": words(10)}))
    return home


def words(number: int) -> bytes:
    """Return a tokenizer of so many words."""
    known = {f"w{index}": index for index in range(number)}
    return Tokenizer(models.WordLevel(known, unk_token="w3")).to_str().encode()


def add_more(bundle: Bundle) -> None:
    """Add an engine with kernels to a bundle, and beside it files of somebody else, one of them hidden."""
    engine = stored.store(bundle, stored.manifest(bundle))
    (engine / "kernels" / "here").mkdir(parents=True)
    (engine / "kernels" / "here" / "kernels.json").write_text("{}")
    for name in ("notes.txt", ".bundle.tmp-mine", "bundle.tmp", ".model.old-0123"):
        (bundle.path.parent / name).write_text("mine")


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injector]:
    injector = Injector(tmp_path_factory.mktemp("injector"))
    yield injector
    injector.close()


class Trial:
    """One command on copies of one folder."""

    def __init__(self, name: str, home: Path, injector: Injector, work: Path) -> None:
        self.scenario, self.home, self.injector = SCENARIOS[name], home, injector
        self.folder = work.resolve() / "copy"
        self.old = content(home)
        self.fresh()
        self.injector.warm("tests.fuzz.faults.calls:command", *self.words)
        self.fresh()
        done = self.run()
        assert done.status == 0, done.said
        self.calls, self.new = done.calls, content(self.folder)
        self.old_target, self.new_target = self._read(home), self._read(self.folder)
        assert self.old_target != self.new_target

    @property
    def words(self) -> list[str]:
        return self.scenario.words(self.folder)

    def fresh(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        shutil.copytree(self.home, self.folder, symlinks=True)

    def run(self, at: int = 0, action: str = "EIO") -> Outcome:
        return self.injector.run(self.folder, *self.words, at=at, action=action)

    def _read(self, folder: Path) -> Content:
        return self.scenario.read(folder / self.scenario.target)

    def place(self, at: int, action: str) -> None:
        """Let something happen at a call, and check what is there then, and after the next run."""
        self.fresh()
        done = self.run(at, action)
        self._check_end(done, action)
        left = content(self.folder)
        others = {name: sum_ for name, sum_ in self.old.items() if not self._is_target(name)}
        assert others.items() <= left.items(), "files of others are lost"
        found = self._read(self.folder)
        assert found in (self.old_target, self.new_target), "half"
        if action == "SIGKILL":
            pass
        elif action in EXIT:
            assert left in (self.old, self.new), "there is litter"
            is_said = "is written and whole" in done.said
            assert is_said == (found == self.new_target), f"{done.said!r} is not true"
        else:
            assert (done.status == 0) == (found == self.new_target), f"exit code {done.status}, and that is not there"
        again = self.run()
        assert again.status == 0, again.said
        assert content(self.folder) == self.new, "the next run leaves litter"

    def _check_end(self, done: Outcome, action: str) -> None:
        if action in EXIT:
            assert done.status == EXIT[action], done.said
        else:
            assert done.status in (0, 1), done.said
        assert "Traceback" not in done.said, done.said
        if done.status == 1:
            assert done.said.splitlines()[-1].startswith("error: ")

    def _is_target(self, name: str) -> bool:
        return name == self.scenario.target or name.startswith(f"{self.scenario.target}/")


def failures(trial: Trial, places: list[tuple[int, str]]) -> list[str]:
    """Try places and say what went wrong at which."""
    found = []
    for at, action in places:
        try:
            trial.place(at, action)
        except Exception as error:  # noqa: BLE001 - all places are tried
            call = trial.calls[at - 1] if at <= len(trial.calls) else "?"
            found.append(f"{action} at call {at} ({call}): {error}")
    return found


@pytest.fixture(scope="module")
def trial(small: Path, injector: Injector, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial("tokenizer", small, injector, tmp_path_factory.mktemp("trial"))


@pytest.mark.parametrize(("action", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_after_publishing_says_that_it_is_written(trial: Trial, action: str, code: int, said: str) -> None:
    for call in ("rename", "unlink"):  # of what was replaced, and of the lock
        at = max(at for at, name in enumerate(trial.calls, 1) if name == call)
        trial.place(at, action)
        trial.fresh()
        done = trial.run(at, action)
        assert (done.status, done.out) == (code, "")
        assert done.said.splitlines()[-1] == f"{said}; {trial.folder}/out/bundle is written and whole"


def test_some_places_of_the_shortest_command(trial: Trial) -> None:
    """The calls that change names, and some others, each with the next of the actions; and the copy of a file."""
    names = [at for at, call in enumerate(trial.calls, 1) if call in ("rename", "mkdir", "flock")]
    others = list(range(1, len(trial.calls), len(trial.calls) // 10))
    actions = (*OFTEN, *SELDOM)
    _, copying, *_ = (at for at, call in enumerate(trial.calls, 1) if call.startswith("sendfile"))
    places = [(at, actions[index % len(actions)]) for index, at in enumerate(sorted({*names, *others}))]
    places.append((copying, "EIO"))  # the end of a file's copy, whose error names the file that is read
    assert len(places) >= 15
    assert not failures(trial, places)


def chosen(calls: list[str]) -> list[tuple[int, str]]:
    """Return places: every one if the environment says so, otherwise some of each call and action, by a seed."""
    changing = [at for at, call in enumerate(calls, 1) if call in CHANGING]
    every = {action: list(range(1, len(calls) + 1)) for action in OFTEN} | dict.fromkeys(SELDOM, changing)
    if PLACES == "all":
        return [(at, action) for action, ats in every.items() for at in ats]
    draw = Random(SEED)
    return [(at, action) for action, ats in every.items() for at in drawn(calls, ats, int(PLACES) // len(every), draw)]


def drawn(calls: list[str], ats: list[int], number: int, draw: Random) -> list[int]:
    """Return so many of the places, of each call about as many."""
    waiting = draw.sample(ats, len(ats))
    seen: Counter[str] = Counter()
    rank = {}
    for at in waiting:
        seen[calls[at - 1]] += 1
        rank[at] = seen[calls[at - 1]]
    return sorted(sorted(waiting, key=rank.__getitem__)[:number])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_places(name: str, home: Path, injector: Injector, tmp_path: Path) -> None:
    if name == "trt":
        if importlib.util.find_spec("tensorrt_rtx") is None:
            pytest.skip("TensorRT-RTX is not installed")
        injector.warm("tests.fuzz.faults.calls:remember_plans")
    if name == "export":
        injector.warm("tests.fuzz.faults.calls:remember_traces")
    trial = Trial(name, home, injector, tmp_path)
    places = chosen(trial.calls)
    found = failures(trial, places)
    counts = Counter(action for _, action in places)
    print(f"\n{name}: {len(trial.calls)} calls, {len(places)} places {dict(counts)}, seed {SEED}, {len(found)} failed")
    print(", ".join(f"{number} {call}" for call, number in sorted(Counter(trial.calls).items())))
    assert not found, f"{len(found)} of {len(places)}:\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EIO", "EACCES"])
def test_every_place_of_a_reload(error: str, dates_bundle: Path, injector: Injector, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(dates_bundle, tmp_path.resolve() / "bundle"))
    before = content(bundle)
    call = "tests.fuzz.faults.calls:reload"
    done = injector.run(Path("/nowhere"), bundle, "3. März 2026", getattr(errno, error), call=call)
    assert done.status == 0, done.said
    found = json.loads(done.out)
    print(f"\nreload: {len(found['calls'])} calls")
    assert not found["wrong"]
    # So a kill at any of them loses nothing.
    assert not set(found["calls"]) & set(CHANGING)
    assert content(bundle) == before
