"""Run the whole acceptance on doubles, and kill it once in each part."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from tests import tiny
from tests.debug.planted import FC1
from tests.gpu import acceptance, behavior, decodes, latency, parity, primitives, test_engine_double
from tests.gpu.job import Job, read_lines
from tests.gpu.parts import FOUND, PARTS, WORK
from tests.gpu.torch_engine import TorchEngine
from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import LIBRARY, make_engines, trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.debug import accuracy
from tfexport.doctor import Diagnosis
from tfexport.errors import EngineError
from tfexport.nn.config import model_spec
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.registry import Graphs
from tfexport.tensorrt import cuda, pipeline, store
from tfexport.tensorrt.config import EngineConfig, engine_key

SETTINGS = ((1, 1), (3, 2))


class KilledError(BaseException):
    """The whole acceptance was killed."""


@pytest.mark.slow
def test_a_kill_in_any_part_loses_no_number(
    dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    for target, name, double in doubles(dates_bundle):
        monkeypatch.setattr(target, name, double)
    for _ in range(len(PARTS) + 1):
        with suppress(KilledError):
            acceptance.main(["--output", str(tmp_path), "--work", str(tmp_path / "work")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert {part["part"]: (part["status"], part["is_complete"]) for part in report["parts"]} == {
        part.name: ("passed", True) for part in PARTS
    }
    for part in report["parts"]:
        lines = read_lines(tmp_path / "parts" / f"{part['part']}.jsonl")
        ended = [line for line in lines if line["status"] != "unfinished"]
        assert ended == part["checks"], "every check has ended once, and its numbers are in the report"
        began = [line["name"] for line in lines if line["status"] == "unfinished"]
        killed = ended[min(1, len(ended) - 1)]["name"]
        assert sorted(began) == sorted([killed, *(check["name"] for check in ended)]), "nothing else has begun twice"
    numbers = [check["numbers"] for part in report["parts"] for check in part["checks"]]
    measured = {(each["backend"], each["setting"]) for each in numbers if "step_ms" in each}
    assert len(measured) == len([each for each in numbers if "step_ms" in each]) == 2 * 22 + 3 * 8
    text = (tmp_path / "report.md").read_text()
    assert all(f"\n| {backend} | " in text for backend, _ in measured)


class DyingJob(Job):
    def __init__(self, settings: Mapping[str, str], dies_in: int) -> None:
        super().__init__(Path(settings[WORK]), Path(settings[FOUND]))
        self.dies_in = dies_in

    def check(self, name: str, call: Any, *arguments: Any, **options: Any) -> bool:
        def dying(numbers: dict[str, Any]) -> None:
            call(numbers)
            self.dies_in -= 1
            if self.dies_in == 0:
                raise KilledError

        return super().check(name, dying, *arguments, **options)


def run_here(command: Sequence[str], settings: Mapping[str, str], log: IO[bytes], limit_s: float) -> int:
    """Run a part in this process; the first time, it dies in its second check, and the acceptance with it."""
    found = Path(settings[FOUND])
    marker, (part,) = found.with_suffix(".killed"), (p for p in PARTS if command[-1].endswith(f"[{p.name}]"))
    if not marker.exists():
        marker.touch()
        part.run(DyingJob(settings, 2))
        found.unlink()
        part.run(DyingJob(settings, 1))  # it has only one check
    job = DyingJob(settings, 0)
    part.run(job)
    return int(bool(job.failed))


def doubles(dates: Path) -> list[tuple[Any, str, Any]]:
    """Return objects, names of attributes, and what replaces them."""
    shared = CudaDouble()

    def bundle(self: Job, source: str, precision: str = "fp32", purpose: str = "") -> Path:
        path = self.work / "bundles" / "-".join(filter(None, (source, precision, purpose)))
        return path if path.exists() else self.copy(path.name, dates, engines=False)

    def build(path: Path, config: EngineConfig, **options: Any) -> Any:
        folder = path / "engines" / resolve(path, config).name
        folder.mkdir(parents=True)
        for name in ("encoder", "decoder"):
            (folder / f"{name}.plan").write_bytes(bytes(2000))
        return SimpleNamespace(path=folder)

    def resolve(path: Path, config: EngineConfig) -> Any:
        return SimpleNamespace(name=engine_key(replace(config, variant=config.variant or "static")))

    def load_engine(bundle: Any, name: str = "") -> Any:
        if bundle.path.name in ("refusals", "foreign"):
            raise EngineError("it is damaged")
        graphs, config = Graphs.of(bundle), EngineConfig(max_batch=32)
        engines, limits = make_engines(graphs.paths, graphs.spec, "static", config, shared, [], TorchEngine)
        return SimpleNamespace(plans=engines, manifest=SimpleNamespace(limits=limits), library=LIBRARY)

    def open_engine(path: Path, name: str) -> Any:
        graphs = Graphs.of(open_bundle(path))
        return trt_session(graphs.paths, graphs.spec, "static", kind=TorchEngine)

    def eager(precision: str, device: str) -> tuple[Any, float]:
        model = tiny.model(tiny.config(), dtype=torch.float32)
        return EagerSession(model, model_spec(model.config, "fp32")), 1e6

    def on_cpu(module: Any, *names: str) -> list[tuple[Any, str, Any]]:
        return [(module, name, functools.partial(getattr(module, name), device="cpu")) for name in names]

    def diagnosis_of(bundle: Path) -> Any:
        return SimpleNamespace(agrees=bundle.parent.name == "bundles", stages=(), fp32_layers=[FC1])

    diagnosis = Diagnosis("0", "3.11", "Linux x86_64", (), "", (), (), (), ())
    report = SimpleNamespace(numbers=(), decodes=(), passed=True)
    return [
        (acceptance, "run_process", run_here),
        (acceptance, "skipped", lambda part: ""),
        (acceptance, "diagnose", lambda: diagnosis),
        (Job, "bundle", bundle),
        (pipeline, "build_engines", build),
        (pipeline, "resolve_build", resolve),
        (store, "load_engine", load_engine),
        (cuda, "Cuda", lambda: shared),
        (cuda, "need_gpu", lambda: L4),
        (decodes, "open_engine", open_engine),
        (decodes, "SETTINGS", SETTINGS),
        (decodes, "LAUNCHES", SETTINGS[:1]),
        (decodes, "NEW_TOKENS", 3),
        (decodes, "MEASURED_S", 0),
        (latency, "MEASURED", "dates"),
        (latency, "given_to_gpu", lambda call: (call(), 7)[1]),
        (latency, "eager_session", eager),
        (latency, "double_latency", functools.partial(latency.double_latency, cuda=CudaDouble, engine=TorchEngine)),
        *on_cpu(latency, "ort_latency", "eager_latency", "compile_latency"),
        *on_cpu(parity, "ort_cuda", "ort_presets"),
        *on_cpu(behavior, "ties"),
        (primitives, "primitives", functools.partial(primitives.primitives, device="cpu", large_bytes=1 << 20)),
        (torch, "compile", lambda call, **options: call),
        (parity, "verify_bundle", lambda *arguments, **options: report),
        (parity, "read_dates", lambda bundle, numbers, **options: numbers.update(texts="2026-11-27")),
        (parity, "library_takes", lambda plan: "validity VALID"),
        (parity, "PRESETS", ("tiny", parity.ENCODER_ALONE)),
        (behavior, "together", lambda opened: None),
        (behavior, "served", lambda bundle, engine, devices: ["2026-11-27"]),
        (behavior, "inspected", lambda bundle, engine, numbers: None),
        (behavior, "slowest_layers", lambda bundle, engine, numbers: None),
        (accuracy, "diagnose", lambda bundle, config, **options: diagnosis_of(bundle)),
        (behavior, "VOCABULARIES", behavior.VOCABULARIES[:1]),
        (primitives, "median_us", lambda queue: (queue(), 1.0)[1]),
        (primitives, "replay_us", lambda queue: (queue(), 1.0)[1]),
        (test_engine_double, "GPU", test_engine_double.HOST),
        (test_engine_double, "CHECKS", {"replays": test_engine_double.replays, "memory": test_engine_double.memory}),
        (test_engine_double, "contract_session", lambda place, variant, once: (None, None)),
        (test_engine_double, "check_contract", lambda session, model: None),
    ]
