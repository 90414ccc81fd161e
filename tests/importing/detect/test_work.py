"""The work of an import, counted instead of timed: candidates, calls and loaded modules."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.importing.detect.test_match import made
from tests.importing.selfmade import SELFMADE
from tfexport.errors import CheckpointError
from tfexport.importing.detect._draft import drafts
from tfexport.importing.detect.search import Budget, Detection, detect
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import fits_names
from tfexport.importing.layout.layout import builtin_layouts, render_layout
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference
from tfexport.importing.reference.weights import completed
from tfexport.nn.switches import Value


@pytest.fixture(scope="module")
def reference(once: Callable[[str, Callable[[Path], object]], Path]) -> ReferenceOutputs:
    return read_reference(once("reference-work", lambda path: made("HeadLists", path)))


# Switches that need not be searched here.
GIVEN: dict[str, Value] = {"norm": "layernorm", "embedding_scale": 1.0, "logit_scale": 1.0}


def found(reference: ReferenceOutputs, limit: int = 20_000) -> tuple[Detection, Budget]:
    budget = Budget(limit)
    return detect(reference.state, reference, [], budget=budget, settings=GIVEN), budget


def test_a_search_does_not_depend_on_the_clock(reference: ReferenceOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where every step takes an hour, a search finds the same with the same work."""
    quiet, spent = found(reference)
    # The right mapping comes first, and few of its switches have unusual values.
    assert spent.spent <= 12
    hours = iter(range(0, 10**9, 3600))
    here = threading.get_ident()  # event loops of other threads need their clock
    for name in ("monotonic", "perf_counter", "time", "process_time"):
        clock = getattr(time, name)
        monkeypatch.setattr(
            time, name, lambda clock=clock: float(next(hours)) if threading.get_ident() == here else clock()
        )
    busy, again = found(reference)
    assert busy.search is not None
    assert busy.search.accepted
    assert render_layout(busy.layout) == render_layout(quiet.layout)
    assert again.spent == spent.spent


def test_a_budget_stops_a_search_and_a_larger_one_completes_it(reference: ReferenceOutputs) -> None:
    _, whole = found(reference)
    for limit, is_enough in ((1, False), (whole.spent - 2, False), (whole.spent, True)):
        result, budget = found(reference, limit)
        assert result.search is not None
        assert (result.search.accepted, result.search.is_cut) == (is_enough, not is_enough)
        assert limit <= budget.spent <= limit + 1  # a close candidate also runs on the whole batch


# Sizes that grow


Make = Callable[[int], Mapping[str, Tensor]]


def one(*shape: int) -> Tensor:
    return torch.ones(shape or (2, 2))


def beside(make: Callable[[int], Iterator[tuple[str, Tensor]]]) -> Make:
    """Put n tensors beside those of a model."""
    return lambda n: {**SELFMADE["HeadLists"]().state_dict(), **dict(make(n))}


GROWING: dict[str, Make] = {
    "numbers": lambda n: {f"k{i}": one() for i in range(n)},
    "layers": lambda n: {f"layers.{i}.weight": one() for i in range(n)},
    "lists of layers": lambda n: {f"a.{i}.b.{j}.weight": one() for i in range(n // 4) for j in range(4)},
    "words": lambda n: {f"{name(i)}.weight": one() for i in range(n)},
    "one layer": lambda n: {f"layers.{j}.{name(i)}.weight": one() for i in range(n // 2) for j in range(2)},
    "beside a model": beside(lambda n: ((f"{name(i)}.weight", one(24, 24)) for i in range(n))),
    "counters": beside(lambda n: ((f"{name(i)}.step", torch.tensor(i)) for i in range(n))),
}


def name(number: int) -> str:
    """Spell a number in letters."""
    return "x" + "".join("abcdefghij"[int(digit)] for digit in str(number))


class Key(str):
    """Counts how often keys are compared, which no profile sees."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return str.__eq__(self, other)


def work(call: Callable[[], object]) -> int:
    """Count the calls, of C too, and the comparisons of keys, that a call takes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    Key.compared = 0
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls + Key.compared


@pytest.mark.parametrize("kind", GROWING)
def test_the_matcher_takes_twice_the_work_for_twice_the_keys(kind: str) -> None:
    def read(n: int) -> None:
        tensors = {Key(key): tensor for key, tensor in GROWING[kind](n).items()}
        with contextlib.suppress(CheckpointError):
            next(drafts(tensors))

    few, many = (work(partial(read, n)) for n in (400, 1600))
    assert many < 6 * few


def test_a_layout_that_does_not_fit_is_left_at_its_first_key() -> None:
    keys = list(map(name, range(20_000)))
    layouts = builtin_layouts().values()
    assert work(lambda: [fits_names(layout, keys) for layout in layouts]) < 20_000


def test_equal_tensors_are_found_by_hash() -> None:
    generator = torch.Generator().manual_seed(0)

    def complete(n: int) -> None:
        state = {f"{side}.{i}": torch.randn(3, generator=generator) for i in range(n) for side in "ab"}
        completed({key: value for key, value in state.items() if key[0] == "a"}, state, [])

    few, many = (work(partial(complete, n)) for n in (100, 400))
    assert many < 6 * few


# What is loaded, and on how many threads it runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint and its reference."""
    made("HeadLists", tmp_path / "reference")
    torch.manual_seed(0)
    save_file(SELFMADE["HeadLists"]().state_dict(), tmp_path / "mine.safetensors")
    return tmp_path


def test_a_small_model_runs_on_one_thread(folder: Path) -> None:
    """Two would wait for each other after every operation, on a busy machine for many times the work."""
    seen: set[int] = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        import_checkpoint(
            folder / "mine.safetensors",
            folder / "model",
            reference=folder / "reference",
            on_progress=lambda stage, done: seen.add(torch.get_num_threads()),
        )
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (seen, after) == ({1}, 2)


def test_an_import_does_not_load_the_compiler(folder: Path) -> None:
    """PyTorch's compiler takes longer to load than a small import takes."""
    program = (
        "import sys\n"
        "from tfexport.importing.importer import import_checkpoint\n"
        "from tfexport.importing.config import ImportConfig\n"
        "from pathlib import Path\n"
        "done = import_checkpoint('mine.safetensors', 'model', ImportConfig(), reference=Path('reference'))\n"
        "assert done.certificate.proven\n"
        "print(*(name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [], "")
