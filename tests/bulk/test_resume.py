"""A run that was stopped anywhere is resumed: no row is decoded twice, lost, or mixed with those of another run."""

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

import tfexport
from tests.bulk.corpus import TEXTS, check_files, check_outputs, expected, outputs, write
from tfexport.bulk._files import Place
from tfexport.bulk._job import Store
from tfexport.bulk.config import BulkConfig
from tfexport.bulk.run import generate_file
from tfexport.errors import BundleError, InputError
from tfexport.model.model import Model

SMALL = BulkConfig(rows_per_part=3, batch_size=3)


def begin(model: Model, source: Path, target: Path, parts: int, config: BulkConfig = SMALL, **options: Any) -> None:
    """Run until this many parts are saved, and stop as Ctrl-C does."""

    def stop(_progress: object) -> None:
        if len(list(target.with_name(f"{target.name}.parts").glob("part-*"))) == parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_file(model, source, target, config, on_progress=stop, **options)
    assert not target.exists()


def test_finished_parts_are_not_decoded_again(model: Model, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 3)
    check_files(tmp_path, "in.jsonl", "out.jsonl.parts")
    parts = [f"part-0000000{number}.parquet" for number in range(3)]
    check_files(tmp_path / "out.jsonl.parts", "job.json", "rows.parquet", "texts.parquet", *parts)
    (tmp_path / "out.jsonl.parts" / parts[1]).unlink()
    lines: list[str] = []
    summary = generate_file(model, source, target, SMALL, report=lines.append)
    assert (summary.num_rows, summary.num_decoded) == (len(TEXTS), len(TEXTS) - 6)
    assert "resuming a former run: 6 of 11 rows are done" in lines
    check_outputs(outputs(target), expected(model))
    check_files(tmp_path, "in.jsonl", "out.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_a_changed_run_is_refused(change: dict[str, Any], message: str, model: Model, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 2)
    config = BulkConfig(**{"rows_per_part": 3, **change.pop("config", {})})
    source.write_bytes(change.pop("input", source.read_bytes()))
    with pytest.raises(InputError, match=f"{message}.* remove {target}.parts"):
        generate_file(model, source, target, config, **change)
    assert len(list((tmp_path / "out.jsonl.parts").glob("part-*"))) == 2


def test_another_bundle_is_refused(model: Model, dates_bundle: Path, dates_fp16: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 1)
    with tfexport.load(dates_fp16) as other, pytest.raises(InputError, match="bundle_sha256 is "):
        generate_file(other, source, target, SMALL)
    shutil.copytree(dates_bundle, tmp_path / "copy")
    with tfexport.load(tmp_path / "copy") as same:
        assert generate_file(same, source, target, BulkConfig(rows_per_part=3, batch_size=7)).num_decoded == 8


def test_a_changing_input_is_refused(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"

    def change(_line: object) -> None:
        write(source, TEXTS[::-1])

    stage = Store.stage
    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"in\.jsonl was changed while it was read"):
        patch.setattr(Store, "stage", lambda *given: (stage(*given), change(None)))
        generate_file(model, source, target, SMALL)
    check_files(tmp_path, "in.jsonl")
    write(source)
    generate_file(model, source, target, SMALL, on_progress=change)
    check_outputs(outputs(target), expected(model))


@pytest.mark.parametrize("where", ["part-00000001.parquet", "texts.parquet", "rows.parquet", "job.json"])
def test_damaged_parts_are_found(where: str, model: Model, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    begin(model, source, target, 3)
    path = tmp_path / "out.jsonl.parts" / where
    raw = bytearray(path.read_bytes())
    raw[-10 if where == "job.json" else raw.index(b"\x28\xb5\x2f\xfd") + 8] ^= 1  # in the first page
    path.write_bytes(raw)
    if where == "texts.parquet":
        path.with_name("part-00000000.parquet").unlink()  # so that its texts are read
    message = rf"{where} (is not a complete Parquet file|was changed|is not JSON)"
    with pytest.raises((InputError, BundleError), match=message):
        generate_file(model, source, target, SMALL)
    assert not target.exists()
    if where not in ("texts.parquet", "rows.parquet"):
        path.unlink()
        summary = generate_file(model, source, target, SMALL)
        assert summary.num_decoded == (len(TEXTS) if where == "job.json" else 3)
        check_outputs(outputs(target), expected(model))


@pytest.mark.parametrize("is_of_this_run", [True, False])
def test_a_part_in_the_place_of_another_is_found(is_of_this_run: bool, model: Model, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    if not is_of_this_run:
        begin(model, source, target, 2, num_beams=2)
        shutil.move(tmp_path / "out.jsonl.parts" / "part-00000001.parquet", tmp_path / "other")
        shutil.rmtree(tmp_path / "out.jsonl.parts")
    begin(model, source, target, 2)
    parts = tmp_path / "out.jsonl.parts"
    place = parts / "part-00000001.parquet"
    shutil.copy(parts / "part-00000000.parquet" if is_of_this_run else tmp_path / "other", place)
    with pytest.raises(InputError, match=place.name):
        generate_file(model, source, target, SMALL)
    place.unlink()
    generate_file(model, source, target, SMALL)
    check_outputs(outputs(target), expected(model))


def test_foreign_files_in_the_folder_of_parts_stay(model: Model, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.parts").mkdir()
    (tmp_path / "out.jsonl.parts" / "notes").write_text("mine")
    with pytest.raises(InputError, match=r"out\.jsonl\.parts has notes"):
        generate_file(model, write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    check_files(tmp_path / "out.jsonl.parts", "notes")


class Killed(BaseException):
    """Ends a run like kill -9: afterwards, no call changes the disk."""


class Faulty:
    """A file system whose n-th call fails, or is the last one before a kill; `calls` has the names of all calls."""

    COUNTED = "open_output_stream open_input_file move create_dir delete_file delete_dir get_file_info".split()

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


def use_for_output(faulty: Faulty, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(given: object) -> Place:
        return Place(faulty if given == target else fs.LocalFileSystem(), str(given))

    monkeypatch.setattr("tfexport.bulk._job.find_place", place)


@pytest.fixture
def attempt(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that runs once with a fault and once without, and returns the calls of the first run."""
    wanted = expected(model)

    def try_it(suffix: str, at: int = 0, action: str = "kill") -> list[str]:
        folder = tmp_path / f"{suffix[1:]}-{at}-{action}"
        folder.mkdir()
        source, target = write(folder / "in.csv"), folder / f"out{suffix}"
        target.write_text("old")
        faulty, report = Faulty(at, action), list[str]()
        with monkeypatch.context() as patch, suppress(Killed, InputError):
            use_for_output(faulty, target, patch)
            generate_file(model, source, target, SMALL)
            assert action != "kill" or not at
        if target.read_bytes() != b"old":
            check_outputs(outputs(target), wanted)
        kept = list(folder.glob("out*.parts/job.json")) and list(folder.glob("out*.parts/part-*"))
        generate_file(model, source, target, SMALL, report=report.append)
        assert bool(kept) == any("resuming" in line for line in report)
        check_outputs(outputs(target), wanted)
        check_files(folder, "in.csv", target.name)
        shutil.rmtree(folder)
        return faulty.calls

    return try_it


def test_a_kill_at_sampled_file_system_calls_loses_nothing(attempt: Callable[..., list[str]]) -> None:
    """At the moves, which end the stages."""
    calls = attempt(".jsonl")
    moves = [at for at, call in enumerate(calls, 1) if call == "move"]
    assert len(moves) == 3 + 4 + 1  # rows, texts, job, parts, output
    for at in [*moves[::2], moves[-1], len(calls)]:
        attempt(".jsonl", at)
    attempt(".jsonl", moves[5], "ENOSPC")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "ENOSPC"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_kill_at_every_file_system_call_loses_nothing(
    suffix: str, action: str, attempt: Callable[..., list[str]]
) -> None:
    for at in range(1, len(attempt(suffix)) + 1):
        attempt(suffix, at, action)


def test_a_full_disk_keeps_the_parts(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, target = Faulty(0, ""), tmp_path / "out.jsonl"

    def fill(_progress: object) -> None:
        faulty.at = len(faulty.calls) + 1

    use_for_output(faulty, target, monkeypatch)
    message = r"cannot be written \(No space left on device\).* kept in .*out\.jsonl\.parts$"
    with pytest.raises(InputError, match=message):
        generate_file(model, write(tmp_path / "in.csv"), target, SMALL, on_progress=fill)
    assert json.loads((tmp_path / "out.jsonl.parts" / "job.json").read_text())["rows_per_part"] == 3
