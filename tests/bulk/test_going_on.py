"""A run that ends anywhere is gone on with: nothing is decoded twice, lost, or mixed with another run's."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from tests.bulk.corpus import TEXTS, answers, expected, near, no_litter, write_csv, write_jsonl
from tfexport.bulk._files import Place
from tfexport.bulk._job import Store
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.run import Summary, generate_file
from tfexport.errors import BundleError, InputError
from tfexport.model.model import Model

SMALL = BulkConfig(rows_per_part=3, batch_size=3)


class StopHere(Exception):  # noqa: N818 - it is no error
    """Ends a run from within."""


def begin(model: Model, source: Path, target: Path, parts: int, config: BulkConfig = SMALL, **options: Any) -> None:
    """Run until so many parts are kept, and end as Ctrl-C does."""

    def stop(_progress: object) -> None:
        if len(list(target.with_name(f"{target.name}.parts").glob("part-*"))) == parts:
            raise StopHere

    with pytest.raises(StopHere):
        generate_file(model, source, target, config, on_progress=stop, **options)
    assert not target.exists()


def go_on(model: Model, source: Path, target: Path, config: BulkConfig = SMALL, **options: Any) -> Summary:
    return generate_file(model, source, target, config, **options)


def test_what_is_done_is_not_done_again(model: Model, tmp_path: Path) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 2)
    no_litter(tmp_path, "in.jsonl", "out.jsonl.parts")
    no_litter(
        tmp_path / "out.jsonl.parts",
        "job.json",
        "rows.parquet",
        "texts.parquet",
        "part-00000000.parquet",
        "part-00000001.parquet",
    )
    told: list[str] = []
    summary = go_on(model, source, target, report=told.append)
    assert (summary.num_rows, summary.num_decoded) == (len(TEXTS), len(TEXTS) - 6)
    assert "resuming a former run: 6 of 11 rows are done" in told
    near(answers(target), expected(model))
    no_litter(tmp_path, "in.jsonl", "out.jsonl")


def test_parts_that_are_missing_in_between_are_made(model: Model, tmp_path: Path) -> None:
    source, target = write_csv(tmp_path / "in.csv"), tmp_path / "out.parquet"
    begin(model, source, target, 3)
    (tmp_path / "out.parquet.parts" / "part-00000001.parquet").unlink()
    assert go_on(model, source, target).num_decoded == 5
    near(answers(target), expected(model))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_beams": 2}, "num_beams is 2 and was 1"),
        ({"max_new_tokens": 5}, "max_new_tokens is 5 and was None"),
        ({"config": {"output_column": "iso"}}, "output_column is 'iso' and was 'output'"),
        ({"config": {"prefix": "1999-"}}, "prefix is '1999-' and was None"),
        ({"config": {"rows_per_part": 4}}, "rows_per_part is 4 and was 3"),
        ({"input": b'{"text": "1.1.2000"}\n'}, "input_sha256 is "),
    ],
    ids=str,
)
def test_a_run_of_something_else_is_refused(change: dict[str, Any], said: str, model: Model, tmp_path: Path) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 2)
    config = BulkConfig(**{"rows_per_part": 3, **change.pop("config", {})})
    source.write_bytes(change.pop("input", source.read_bytes()))
    with pytest.raises(InputError) as caught:
        go_on(model, source, target, config, **change)
    assert said in str(caught.value)
    assert f"remove {target}.parts" in str(caught.value)
    assert len(list((tmp_path / "out.jsonl.parts").glob("part-*"))) == 2


def test_another_bundle_is_refused(model: Model, dates_bundle: Path, dates_fp16: Path, tmp_path: Path) -> None:
    import tfexport

    source, target = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 1)
    with tfexport.load(dates_fp16) as other, pytest.raises(InputError, match="bundle_sha256 is "):
        go_on(other, source, target)
    shutil.copytree(dates_bundle, tmp_path / "copy")  # the same, wherever it lies
    with tfexport.load(tmp_path / "copy") as same:
        assert go_on(same, source, target, BulkConfig(rows_per_part=3, batch_size=7)).num_decoded == 8


def test_an_input_that_changes_while_it_is_read_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"

    def change(_line: object) -> None:
        write_jsonl(source, TEXTS[::-1])

    stage = Store.stage
    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"in\.jsonl was changed while it was read"):
        patch.setattr(Store, "stage", lambda *given: (stage(*given), change(None)))
        generate_file(model, source, target, SMALL)
    no_litter(tmp_path, "in.jsonl")
    write_jsonl(source)
    generate_file(model, source, target, SMALL, on_progress=change)
    near(answers(target), expected(model))


@pytest.mark.parametrize("where", ["part-00000001.parquet", "texts.parquet", "rows.parquet", "job.json"])
def test_damage_of_what_was_kept_is_found(where: str, model: Model, tmp_path: Path) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 3)
    path = tmp_path / "out.jsonl.parts" / where
    raw = bytearray(path.read_bytes())
    raw[-10 if where == "job.json" else raw.index(b"\x28\xb5\x2f\xfd") + 8] ^= 1  # in the first page
    path.write_bytes(raw)
    if where == "texts.parquet":
        path.with_name("part-00000000.parquet").unlink()  # so that its texts are read
    with pytest.raises((InputError, BundleError), match=rf"{where} (is damaged|was changed|is not JSON)"):
        go_on(model, source, target)
    assert not target.exists()
    if where in ("texts.parquet", "rows.parquet"):
        return
    path.unlink()
    summary = go_on(model, source, target)
    assert summary.num_decoded == (len(TEXTS) if where == "job.json" else 3)
    near(answers(target), expected(model))
    no_litter(tmp_path, "in.jsonl", "out.jsonl")


def test_files_of_others_in_the_folder_of_parts_stay(model: Model, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.parts").mkdir()
    (tmp_path / "out.jsonl.parts" / "notes").write_text("mine")
    with pytest.raises(InputError, match=r"out\.jsonl\.parts has notes"):
        go_on(model, write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    no_litter(tmp_path / "out.jsonl.parts", "notes")


class Killed(BaseException):
    """Ends a run like kill -9: nothing happens on the disk afterwards."""


class Faulty:
    """A file system of pyarrow of which the n-th call fails, or is the last one before a kill; `calls` names all."""

    COUNTED = (
        "open_output_stream",
        "open_input_file",
        "move",
        "create_dir",
        "delete_file",
        "delete_dir",
        "get_file_info",
    )

    def __init__(self, at: int, action: str) -> None:
        self.system, self.at, self.action, self.calls = fs.LocalFileSystem(), at, action, list[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.system, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) >= self.at > 0 and self.action == "kill":
                if len(self.calls) == self.at and name == "delete_dir":
                    next(Path(arguments[0]).iterdir()).unlink()  # it is not atomic
                raise Killed
            if len(self.calls) == self.at:
                raise OSError(errno.ENOSPC, "no space")
            return method(*arguments, **options)

        return call if name in self.COUNTED else method


@pytest.fixture
def attempt(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that runs once with a fault and once without, and returns the calls of the first run."""
    wanted = expected(model)

    def try_it(suffix: str, at: int = 0, action: str = "kill") -> list[str]:
        folder = tmp_path / f"{suffix[1:]}-{at}-{action}"
        folder.mkdir()
        source, target = write_csv(folder / "in.csv"), folder / f"out{suffix}"
        target.write_text("old")
        faulty = Faulty(at, action)

        def place(given: object) -> Place:
            return Place(faulty if given == target else fs.LocalFileSystem(), str(given))

        report: list[str] = []
        with monkeypatch.context() as patch, suppress(Killed, InputError):
            patch.setattr("tfexport.bulk._job.find_place", place)
            generate_file(model, source, target, SMALL)
            assert action != "kill" or not at
        if target.read_bytes() != b"old":
            near(answers(target), wanted)
        kept = list(folder.glob("out*.parts/job.json")) and list(folder.glob("out*.parts/part-*"))
        generate_file(model, source, target, SMALL, report=report.append)
        assert bool(kept) == any("resuming" in line for line in report)
        near(answers(target), wanted)
        no_litter(folder, "in.csv", target.name)
        shutil.rmtree(folder)
        return faulty.calls

    return try_it


def test_a_kill_at_some_calls_of_the_file_system_loses_nothing(attempt: Callable[..., list[str]]) -> None:
    """Those that change names, for each is a stage."""
    calls = attempt(".jsonl")
    moves = [at for at, call in enumerate(calls, 1) if call == "move"]
    assert len(moves) == 3 + 4 + 1  # rows, texts, job, parts, output
    for at in [*moves[::2], moves[-1], len(calls)]:
        attempt(".jsonl", at)
    attempt(".jsonl", moves[5], "ENOSPC")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "ENOSPC"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_call_of_the_file_system(suffix: str, action: str, attempt: Callable[..., list[str]]) -> None:
    for at in range(1, len(attempt(suffix)) + 1):
        attempt(suffix, at, action)


def test_a_disk_that_is_full_says_what_is_kept(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, target = Faulty(0, ""), tmp_path / "out.jsonl"
    write_csv(tmp_path / "in.csv")

    def place(given: object) -> Place:
        return Place(faulty if given == target else fs.LocalFileSystem(), str(given))

    def fill(_progress: object) -> None:
        faulty.at = len(faulty.calls) + 1

    monkeypatch.setattr("tfexport.bulk._job.find_place", place)
    with pytest.raises(
        InputError, match=r"cannot be written \(No space left on device\).* kept in .*out\.jsonl\.parts$"
    ):
        generate_file(model, tmp_path / "in.csv", target, SMALL, on_progress=fill)
    assert json.loads((tmp_path / "out.jsonl.parts" / "job.json").read_text())["rows_per_part"] == 3
