"""Write the checks of the acceptance, and make bundles and engines once for all parts."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfexport.bundle.manifest import ENGINES
from tfexport.contract import Variant
from tfexport.errors import TfexportError
from tfexport.export.config import ExportConfig
from tfexport.precision import Precision
from tfexport.tensorrt.config import EngineConfig, Target

DATES = Path(__file__).resolve().parents[2] / "models" / "dates"


class Job:
    """Writes each check when it ends, in case the process dies; parts share the folder `work`."""

    def __init__(self, work: Path, found: Path) -> None:
        # One JSON object a line: name, status, detail, seconds, numbers.
        self.work, self._found = work, found
        self.failed: list[str] = []

    @contextlib.contextmanager
    def check(self, name: str, refusal: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[dict[str, Any]]:
        """Yield a dictionary for numbers; the check fails if the block raises, and `refusal` makes it "refused"."""
        began, status, detail = time.perf_counter(), "passed", ""
        numbers: dict[str, Any] = {}
        try:
            yield numbers
        except refusal as error:
            status, detail = "refused", str(error)
        except Exception as error:  # noqa: BLE001 - every error is a result
            traceback.print_exc()
            status = "failed"
            detail = str(error) if isinstance(error, TfexportError) else f"{type(error).__name__}: {error}"
        if status == "failed":
            self.failed.append(f"{name}: {detail}")
        seconds = round(time.perf_counter() - began, 2)
        entry = {"name": name, "status": status, "detail": detail, "seconds": seconds, "numbers": numbers}
        print(entry, flush=True)
        with self._found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def bundle(self, source: str, precision: Precision = "fp32") -> Path:
        """Return a bundle of a preset or of models/dates; export it if no part has done so."""
        from tfexport.export import export_bundle

        path = self.work / "bundles" / f"{source}-{precision}"
        if not path.exists():
            model = str(DATES) if source == "dates" else f"preset:{source}"
            config = ExportConfig(precision=precision, variants=("concat", "static"))  # those that run on a GPU
            export_bundle(model, path, config, verify=False)
        return path

    def engine(
        self, bundle: Path, target: Target, variant: Variant | None, precision: Precision, **more: Any
    ) -> str | None:
        """Return the name of an engine in a bundle, built if no part has done so; None if it cannot be built."""
        from tfexport.tensorrt.config import engine_key
        from tfexport.tensorrt.pipeline import build_engines, resolve_build

        settings = ", ".join(f"{name} {value}" for name, value in more.items())
        what = " ".join(part for part in ("build", bundle.name, variant or "encoder", precision, settings) if part)
        if target == "tensorrt":
            timings = self.work / "timings"
            timings.mkdir(exist_ok=True)
            more["timing_cache"] = str(timings)
        config = EngineConfig(target=target, variant=variant, precision=precision, **more)
        found: list[str] = []
        with self.check(what) as numbers:
            key = engine_key(resolve_build(bundle, config).config)
            if not (bundle / ENGINES / key).exists():
                build_engines(bundle, config, report=lambda line: print(line, flush=True))
            numbers["MiB"] = round(sum(f.stat().st_size for f in (bundle / ENGINES / key).glob("*.plan")) / 2**20, 1)
            found.append(key)
        return found[0] if found else None

    def copy(self, name: str, source: Path, *, engines: bool) -> Path:
        path = self.work / "bundles" / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path, ignore=None if engines else shutil.ignore_patterns(ENGINES))
        return path
