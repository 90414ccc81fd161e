"""Compare whole decodes on engines with ONNX Runtime."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import tfexport
from tests.gpu import behavior
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.conftest import Model
from tests.tensorrt.session.trt_double import LIBRARY, FakeContext, FakeEngine, RtxEngine, make_engines
from tfexport.bench.config import BenchConfig, resolve
from tfexport.bench.trace import trace_calls
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.contract import ENCODER, Variant
from tfexport.decode.offline import decode
from tfexport.errors import BackendError, EngineError
from tfexport.generation import DecodeConfig
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import BACKENDS, Graphs, get
from tfexport.runtime.session import Session
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Gpu
from tfexport.tensorrt.session.session import TrtSession


def dates_ort(model: Model, variant: Variant = "static") -> Session:
    return OrtSession(Graphs(model.graphs, model.spec), variant, threads=1)


def test_threads_decode_at_once_over_the_same_engines(dates: Model) -> None:
    cuda, log = CudaDouble(), []  # type: ignore[var-annotated]
    engines, limits = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=8), cuda, log)
    sessions = [TrtSession(engines, dates.spec, "static", limits, LIBRARY, cuda) for _ in range(2)]  # type: ignore[arg-type]
    config, expected = DecodeConfig(num_beams=2), decode(dates_ort(dates), dates.sources, DecodeConfig(num_beams=2))

    def run(number: int) -> list[Any]:
        return decode(sessions[number % 2], dates.sources, config, batch_size=1 + number % 4)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(8)):
            assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]
    for session in sessions:
        session.close()
    assert cuda.is_empty


def test_rtx_captures_by_itself_where_we_cannot(dates: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RtxEngine, "is_capturable", False)
    cuda = CudaDouble()
    session = dates.trt(cuda=cuda, kind=RtxEngine)
    found = decode(session, dates.sources, DecodeConfig(num_beams=2))
    expected = decode(dates_ort(dates), dates.sources, DecodeConfig(num_beams=2))
    assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]
    assert cuda.counts["capture"] == 0
    strategies = [config.cuda_graph_strategy.name for config in session.engines["decoder_static"].configs]
    assert "WHOLE_GRAPH_CAPTURE" in strategies
    assert {c.cuda_graph_strategy.name for c in session.engines[ENCODER].configs} == {"DISABLED"}


@pytest.fixture
def on_doubles(dates: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tfexport.Model]]:
    """Return `tfexport.load` on a bundle with an engine `fast` on doubles."""
    bundle, cudas = dates.path, [CudaDouble(), CudaDouble(1)]

    def load_engine(opened: Bundle, name: str | None, number: int) -> Any:
        if name not in (None, "fast"):
            raise EngineError(f"{opened.path}: has no engine {name}")
        log: list[str] = []
        engines, limits = make_engines(
            dates.graphs, dates.spec, "static", EngineConfig(max_batch=4), cudas[number], log
        )
        config = EngineConfig(variant="static", precision="fp32")
        manifest = SimpleNamespace(config=config, limits=limits, plans={})
        path, reasons = opened.path / "engines" / "fast", SimpleNamespace(reason=lambda: log[-1])
        return SimpleNamespace(manifest=manifest, plans=engines, library=LIBRARY, path=path, log=reasons)

    monkeypatch.setattr("tfexport.tensorrt.session.session.load_engine", load_engine)
    monkeypatch.setattr("tfexport.tensorrt.session.session.Cuda", cudas.__getitem__)
    gpu = Gpu(index=0, name="none", compute_capability="0.0", memory_bytes=0, driver_version="0.0")
    monkeypatch.setattr("tfexport.tensorrt.session.session.need_gpu", lambda number: gpu)
    with patch.dict(BACKENDS, trt=dataclasses.replace(get("trt"), requirements=())):
        yield lambda **options: tfexport.load(bundle, **options)


def test_a_bundle_generates_with_its_engine(dates: Model, on_doubles: Callable[..., tfexport.Model]) -> None:
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989", "2026年3月3日", "May 4, 1977"]
    with tfexport.load(dates.path, backend="ort") as model:
        expected = model.generate(texts, num_beams=2)
    for engine in (None, "fast"):
        with on_doubles(backend="trt", engine=engine) as model:
            assert model.session.backend == "trt"
            assert [result.text for result in model.generate(texts, num_beams=2)] == [r.text for r in expected]


def test_a_largest_batch_that_does_not_fit_is_a_warning(
    on_doubles: Callable[..., tfexport.Model], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fits in (True, False):
        free = (1 << 40 if fits else 100_000, 1 << 40)
        monkeypatch.setattr(CudaDouble, "memory", lambda self, free=free: free)
        with on_doubles(device="cuda:1", backend="trt") as model:
            largest = model.session.largest_bytes()  # type: ignore[attr-defined]
            assert ("its largest batch needs" in caplog.text) is not fits
            model.generate(["le 14 juillet 1989"] * 4)
            assert largest >= model.session.memory_bytes() // 2  # type: ignore[attr-defined]


def test_a_server_has_an_engine_on_each_gpu(dates: Model, on_doubles: Callable[..., tfexport.Model]) -> None:
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989"] * 8
    used: list[Any] = []

    async def serve() -> list[Any]:
        engine = Engine(dates.path, ServingConfig(slots=4), backend="trt", device="cuda:0,cuda:1")
        async with engine:
            used.extend(served.model.session._engines.cuda for served in engine._served)  # type: ignore[attr-defined]
            before = [cuda.counts["launch"] for cuda in used]
            found = await asyncio.gather(*map(engine.generate, texts))
            assert all(cuda.counts["launch"] > launches for cuda, launches in zip(used, before, strict=True))
            return found

    with on_doubles(backend="trt") as model:
        expected = [result.text for result in model.generate(texts)]
    assert [results[0].text for results in asyncio.run(serve())] == expected
    assert [cuda.number for cuda in used] == [0, 1]
    assert all(cuda.is_empty for cuda in used)


def test_a_trace_has_the_layers_of_every_run(dates: Model, on_doubles: Callable[..., tfexport.Model]) -> None:
    bundle = open_bundle(dates.path)
    config = BenchConfig(backend="trt", scenario="offline", batch_size=(2,), num_beams=2, target_length=(6,))
    events = trace_calls(bundle, resolve(config, bundle.manifest.spec, has_texts=False), None, print)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["decoder_static", "encoder", "phases, trt", "reorder"]
    (call,) = (event for event in events if event.get("cat") == "call")
    layers = [event for event in events if event.get("cat") == "Layer"]
    assert {names[event["pid"]] for event in layers} == {"decoder_static", "encoder", "reorder"}
    assert all(event["name"].startswith(names[event["pid"]]) for event in layers)
    assert all(call["ts"] <= event["ts"] <= call["ts"] + call["dur"] for event in layers)


@pytest.mark.usefixtures("on_doubles")
def test_parts_of_the_acceptance_run_on_doubles(dates: Model) -> None:
    one, two = (behavior.served(dates.path, "fast", devices) for devices in ("cuda:0", "cuda:0,cuda:1"))
    assert one == two
    assert len(one) == 8 * len(behavior.TEXTS)
    numbers: dict[str, Any] = {}
    behavior.slowest_layers(dates.path, "fast", numbers)
    assert "decoder_static attention us" in numbers
    assert all(us > 0 for us in numbers.values())


def test_gpus_are_used_by_threads_side_by_side(on_doubles: Callable[..., tfexport.Model]) -> None:
    """The double refuses every call, also of an engine, while another GPU is the thread's current one."""
    texts = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989"]
    with on_doubles(device="cuda:0", backend="trt") as first, on_doubles(device="cuda:1", backend="trt") as second:

        def read(number: int) -> list[str]:
            model = (first, second)[number % 2]
            return [result.text for result in model.generate(texts, num_beams=1 + number // 2)]

        alone = [read(number) for number in range(4)]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(read, [*range(4)] * 3)) == alone * 3
        assert alone[0::2] == alone[1::2]
        memory = [model.session.memory_bytes() for model in (first, second)]  # type: ignore[attr-defined]
        assert min(memory) > 0
    assert CudaDouble.current_number() == 0


def test_after_a_warm_up_the_first_batch_creates_nothing(on_doubles: Callable[..., tfexport.Model]) -> None:
    texts = ["Dienstag, 3. März 2026", "le 14 juillet 1989", "May 4, 1977"]
    made = {}
    for batches in ((), [(3, 32), (1, 32)]):
        with on_doubles(backend="trt", warm_up=batches) as model:
            longest = max(len(ids) for ids in model.tokenizer.encode(texts)) if model.tokenizer else 0
            assert 16 < longest <= 32
            counts = model.session._pool._engines.cuda.counts  # type: ignore[attr-defined]
            before = counts.copy()
            output = [result.text for result in model.generate(texts)]
            assert output == ["2026-03-03", "1989-07-14", "1977-05-04"]
            made[bool(batches)] = {name: counts[name] - before[name] for name in ("capture", "context")}
    assert made[True] == {"capture": 0, "context": 0}
    assert made[False]["capture"] > 0
    assert made[False]["context"] > 0


def test_an_engine_needs_its_backend_and_variant(on_doubles: Callable[..., tfexport.Model]) -> None:
    with pytest.raises(BackendError, match="ort: engine fast is for TensorRT; use it with --backend trt"):
        on_doubles(backend="ort", engine="fast")
    with pytest.raises(BackendError, match="trt: engine fast has the variant static; leave the variant out"):
        on_doubles(backend="trt", variant="concat")
    with pytest.raises(
        BackendError, match="eager: device cuda:1 is for ONNX Runtime and TensorRT; use it with --backen"
    ):
        on_doubles(backend="eager", device="cuda:1")
    with pytest.raises(EngineError, match="has no engine slow"):
        on_doubles(backend="trt", engine="slow")


class OldContext(FakeContext):
    """An `IExecutionContext` of TensorRT 10.0 to 10.2: memory for activations is a property."""

    @property
    def set_device_memory(self) -> Any:
        raise AttributeError("set_device_memory")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "device_memory":
            FakeContext.set_device_memory(self, value, FakeEngine.device_memory_size_v2)
        else:
            super().__setattr__(name, value)


class OldEngine(FakeEngine):
    """An `ICudaEngine` of TensorRT 10.0 to 10.2, which knows no aliases either."""

    device_memory_size = FakeEngine.device_memory_size_v2
    get_aliased_input_tensor = property()  # type: ignore[assignment]

    def create_execution_context(self, strategy: Any) -> OldContext | None:
        made = super().create_execution_context(strategy)
        return made and OldContext(self, replays_itself=False)


def test_the_oldest_library_runs_the_concat_variant(dates: Model) -> None:
    session = dates.trt("concat", kind=OldEngine)
    found, expected = (decode(one, dates.sources[:5], DecodeConfig(num_beams=2)) for one in (session, dates_ort(dates)))
    assert [text[0].token_ids for text in found] == [text[0].token_ids for text in expected]
