"""Run the checks of the acceptance and write each result, and make bundles and engines once for all parts."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from tfexport.bundle.manifest import ENGINES
from tfexport.contract import Variant
from tfexport.errors import TfexportError
from tfexport.export.config import ExportConfig
from tfexport.precision import Precision, Quantized
from tfexport.tensorrt.config import EngineConfig, Target

DATES = Path(__file__).resolve().parents[2] / "models" / "dates"

Numbers = dict[str, Any]
Entry = dict[str, Any]  # name, status, detail, seconds, numbers


class Job:
    """Runs checks, except those that ended in an earlier run; parts share the folder `work`.

    A line of `found` is a check that begins ("unfinished") or ends, so a process that dies loses one check at most.
    """

    def __init__(self, work: Path, found: Path) -> None:
        self.work, self._found = work, found
        self.failed: list[str] = []
        lines = read_lines(found)
        write_lines(found, lines)  # without the incomplete line of a process that died
        self._statuses = {line["name"]: line["status"] for line in lines}

    def check(
        self,
        name: str,
        call: Callable[[Numbers], object],
        refusal: type[Exception] | tuple[type[Exception], ...] = (),
        *,
        always: bool = False,
    ) -> bool:
        """Run a check, which fails if `call` raises, and return whether it passed.

        `call` gets a dictionary for numbers. A `refusal` makes the check "refused". `always` also runs a check that has
        ended before, and writes the result only if it differs.
        """
        known = self._statuses.get(name, "unfinished")
        if known != "unfinished" and not always:
            return known == "passed"
        began, status, detail = time.perf_counter(), "passed", ""
        numbers: Numbers = {}
        if known == "unfinished":
            self._write(name, known)
        try:
            call(numbers)
        except refusal as error:
            status, detail = "refused", str(error)
        except Exception as error:  # noqa: BLE001 - every error is a result
            traceback.print_exc()
            status = "failed"
            detail = str(error) if isinstance(error, TfexportError) else f"{type(error).__name__}: {error}"
        if status == "failed":
            self.failed.append(f"{name}: {detail}")
        if status != known:
            self._write(name, status, detail, round(time.perf_counter() - began, 2), numbers)
        return status == "passed"

    def _write(self, *values: Any) -> None:
        line = entry(*values)
        self._statuses[line["name"]] = line["status"]
        print(line, flush=True)
        write_lines(self._found, [line], "a")

    def bundle(self, source: str, precision: Precision | Quantized = "fp32", purpose: str = "") -> Path:
        """Return a bundle of a preset or of models/dates, by purpose; export it if no part has done so."""
        from tests.gpu.models import source_of
        from tfexport.export import export_bundle

        path = self.work / "bundles" / "-".join(filter(None, (source, precision, purpose)))
        if not path.exists():
            model = str(DATES) if source == "dates" else source_of(source, self.work)
            config = ExportConfig(precision=precision, variants=("concat", "static"))  # those that run on a GPU
            export_bundle(model, path, config, verify=False)
        return path

    def engine(
        self, bundle: Path, target: Target, variant: Variant | None, precision: Precision | None, **more: Any
    ) -> str | None:
        """Return the name of an engine in a bundle, built if no part has done so; None if it cannot be built."""
        from tfexport.tensorrt.pipeline import build_engines, resolve_build

        settings = ", ".join(f"{name} {value}" for name, value in more.items())
        what = " ".join(
            part for part in ("build", bundle.name, variant or "encoder", precision or "", settings) if part
        )
        if target == "tensorrt":
            timings = self.work / "timings"
            timings.mkdir(exist_ok=True)
            more["timing_cache"] = str(timings)
        config = EngineConfig(target=target, variant=variant, precision=precision, **more)
        found: list[str] = []

        def build(numbers: Numbers) -> None:
            key = resolve_build(bundle, config).name
            if not (bundle / ENGINES / key).exists():
                build_engines(bundle, config, report=lambda line: print(line, flush=True))
            numbers["MiB"] = round(sum(f.stat().st_size for f in (bundle / ENGINES / key).glob("*.plan")) / 2**20, 1)
            found.append(key)

        self.check(what, build, always=True)  # an earlier run may have had another folder
        return found[0] if found else None

    def copy(self, name: str, source: Path, *, engines: bool) -> Path:
        path = self.work / "bundles" / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path, ignore=None if engines else shutil.ignore_patterns(ENGINES))
        return path


def entry(name: str, status: str, detail: str = "", seconds: float = 0.0, numbers: Numbers | None = None) -> Entry:
    return {"name": name, "status": status, "detail": detail, "seconds": seconds, "numbers": numbers or {}}


def read_lines(path: Path) -> list[Entry]:
    """Read the lines that a part has written; the last one may be incomplete."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def read_checks(path: Path) -> list[Entry]:
    """Return the newest result of each check."""
    return list({line["name"]: line for line in read_lines(path)}.values())


def write_lines(path: Path, lines: Iterable[Entry], mode: Literal["w", "a"] = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
