"""Check threads, refusals and equal logits on a GPU."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.gpu import decodes
from tests.gpu.decodes import hypotheses
from tests.gpu.job import Job, Numbers
from tests.gpu.parity import TEXTS
from tests.runtime.exported import planted, ranked, sources
from tests.tensorrt.artifact.stored import flip
from tfexport._io.names import ENGINE_LAYERS
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.manifest import ENGINES
from tfexport.contract import Device, Variant
from tfexport.errors import EngineError, InputError
from tfexport.tensorrt.config import EngineConfig, Target

# Below and above the sizes at which ONNX Runtime uses its radix selection.
VOCABULARIES = (100, 600, 8_000, 32_000)
COUNTS = (1, 8, 64, 100)


def sessions(job: Job, target: Target) -> None:
    """Compare two sessions over one loaded engine in eight threads with each alone."""
    from tfexport.tensorrt.cuda import Cuda
    from tfexport.tensorrt.session.session import TrtSession
    from tfexport.tensorrt.store import load_engine

    bundle = open_bundle(job.bundle("dates"))
    name = job.engine(bundle.path, target, "static", "fp32")
    if name is None:
        return

    def check(numbers: Numbers) -> None:
        engine, cuda = load_engine(bundle, name), Cuda()
        limits = engine.manifest.limits
        opened = [
            TrtSession(engine.plans, bundle.manifest.spec, "static", limits, engine.library, cuda) for _ in range(2)
        ]
        together(opened)
        numbers["device MiB"] = ", ".join(str(session.memory_bytes() // 2**20) for session in opened)
        for session in opened:
            session.close()

    job.check("two sessions, eight threads", check)


def together(opened: Sequence[Any]) -> None:
    """Decode with each session by itself and in eight threads; fail unless the tokens are equal."""
    tasks = [(session, batch, beams) for session in opened for batch in (1, 3, 8) for beams in (1, 4)]
    alone = [hypotheses(*task) for task in tasks]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda task: hypotheses(*task), tasks * 3))
    assert found == alone * 3, "threads get other tokens than a single one"


def refusals(job: Job, target: Target) -> None:
    """Load engines that are damaged or belong elsewhere, then send requests beyond a profile."""
    from tfexport.tensorrt.store import load_engine

    original = job.bundle("dates")
    name = job.engine(original, target, "static", "fp32")
    if name is None:
        return

    def damaged(change: Callable[[Path], object], numbers: Numbers) -> None:
        bundle = job.copy("refusals", original, engines=True)
        change(bundle / ENGINES / name)
        numbers["words"] = raised(lambda: load_engine(open_bundle(bundle), name), EngineError)

    def foreign(numbers: Numbers) -> None:
        bundle = job.copy("foreign", job.bundle("tiny"), engines=False)
        shutil.copytree(original / ENGINES / name, bundle / ENGINES / name)
        numbers["words"] = raised(lambda: load_engine(open_bundle(bundle), name), EngineError)

    changes: dict[str, Callable[[Path], object]] = {
        "a flipped byte": lambda engine: flip(engine / "encoder.plan"),
        "a truncated plan": lambda engine: os.truncate(engine / "encoder.plan", 1000),
        "a missing plan": lambda engine: (engine / "encoder.plan").unlink(),
    }
    for what, change in changes.items():
        job.check(what, functools.partial(damaged, change))
    job.check("an engine of another bundle", foreign)
    job.check("requests that are too large", functools.partial(too_large, original, name))


def too_large(bundle: Path, engine: str, numbers: Numbers) -> None:
    session = decodes.open_engine(bundle, engine)
    for what, shape in (
        ("sources", (session.limits.rows.most + 1, 3)),
        ("tokens", (1, session.spec.max_source_length + 1)),
    ):
        batch = tiny.sources(np.full(shape, 5), np.ones(shape, np.bool_))
        prompts = [[session.spec.tokens.start]] * shape[0]
        numbers[what] = raised(functools.partial(session.batch().add, batch, prompts), InputError)
    session.close()


def raised(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of the error that a call must raise, which must be one line."""
    try:
        call()
    except kind as error:
        message = str(error)
        if "\n" in message:
            raise AssertionError(f"more than one line: {message!r}") from error
        return message
    raise AssertionError("nothing was refused")


def replicas(job: Job, target: Target) -> None:
    """Serve one engine on two replicas, on two GPUs if there are as many."""
    from tfexport.tensorrt.cuda import find_gpus

    bundle = job.bundle("dates")
    name = job.engine(bundle, target, "static", "fp16")
    if name is None:
        return
    names = [gpu.name for gpu in find_gpus()]
    second = 1 if names[1:2] == names[:1] else 0

    def check(numbers: Numbers) -> None:
        one, two = (served(bundle, name, devices) for devices in ("cuda:0", f"cuda:0,cuda:{second}"))
        assert two == one
        numbers["answers"] = len(one)

    job.check(f"replicas on cuda:0 and cuda:{second}", check)


def served(bundle: Path, engine: str, devices: str) -> list[str]:
    """Return the answers to concurrent requests."""
    from tfexport.serve.config import ServingConfig
    from tfexport.serve.engine import Engine

    async def serve() -> list[str]:
        async with Engine(bundle, ServingConfig(slots=8), backend="trt", engine=engine, device=devices) as serving:
            asked = [serving.generate(text, num_beams=1 + number % 3) for number, text in enumerate(TEXTS * 8)]
            return [results[0].text for results in await asyncio.gather(*asked)]

    return asyncio.run(serve())


def observed(job: Job, target: Target) -> None:
    """Read the inspector's layers of an engine, and time each layer with the profiler."""
    bundle = job.bundle("dates")
    name = job.engine(bundle, target, "static", "fp16")
    if name:
        job.check("layers.json", functools.partial(inspected, bundle, name))
        job.check("bench --profile", functools.partial(slowest_layers, bundle, name))


def inspected(bundle: Path, engine: str, numbers: Numbers) -> None:
    from tfexport.tensorrt.inspector import num_fused
    from tfexport.tensorrt.store import open_engine

    plans = open_engine(bundle, engine).manifest.plans
    layers = json.loads((bundle / ENGINES / engine / ENGINE_LAYERS).read_text())
    assert layers.keys() == plans.keys()
    for plan, entry in plans.items():
        numbers[plan] = f"{sum(entry.kernels.values())} kernels, {num_fused(entry.kernels)} fused attentions"


def slowest_layers(bundle: Path, engine: str, numbers: Numbers) -> None:
    from tfexport.bench.config import BenchConfig, resolve
    from tfexport.bench.trace import trace_calls

    opened = open_bundle(bundle)
    config = BenchConfig(backend="trt", engine=engine, scenario="offline", batch_size=(8,), num_beams=2)
    events = trace_calls(opened, resolve(config, opened.manifest.spec, has_texts=False), None, print)["traceEvents"]
    total: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Layer":
            total[event["name"]] += event["dur"]
    assert total, "the library has reported no layers"
    numbers.update({f"{layer[:60]} us": round(us) for layer, us in total.most_common(5)})


def debug(job: Job, target: Target) -> None:
    """Find no layer of the trained model, and those of a planted overflow."""
    job.check("models/dates in fp16", functools.partial(diagnosed, job, target, "dates"))
    job.check("a planted overflow", functools.partial(diagnosed, job, target, "planted"))


def diagnosed(job: Job, target: Target, source: str, numbers: Numbers) -> None:
    from tests.debug.planted import FC1, exported
    from tfexport.debug import accuracy

    config = EngineConfig(target=target, variant="static", precision="fp16", max_batch=4)
    with tempfile.TemporaryDirectory(dir=job.work) as folder:
        bundle = job.bundle("dates") if source == "dates" else exported(Path(folder), "inner")
        found = accuracy.diagnose(bundle, config, report=print)
    numbers.update({stage.stage: f"{stage.error:.1e}" for stage in found.stages})
    numbers["fp32 layers"] = ", ".join(found.fp32_layers or ())
    if source == "dates":
        assert found.agrees, "the engine differs from float32"
    else:
        assert found.fp32_layers is not None
        assert FC1 in found.fp32_layers


def ties(job: Job, device: Device = "cuda") -> None:
    """Compare both variants in ONNX Runtime CUDA with the CPU if all logits have a few values."""
    for vocab in VOCABULARIES:
        for variant in ("concat", "static"):
            job.check(f"{variant}, {vocab} tokens", functools.partial(ranks, job.work, vocab, variant, device))


def ranks(work: Path, vocab: int, variant: Variant, device: Device, numbers: Numbers) -> None:
    from tfexport.export.write import write_graphs
    from tfexport.nn.config import model_spec
    from tfexport.runtime.ort.backend import OrtSession
    from tfexport.runtime.registry import Graphs

    model, row = planted(vocab, levels=5)
    spec = model_spec(model.config, "fp32")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        write_graphs(model, spec, Path(folder), variants=(variant,), opset=18, report=print)
        graphs = {path.stem: path for path in Path(folder).glob("*.onnx")}
        batch = OrtSession(Graphs(graphs, spec), variant, device=device).batch()
        batch.add(tiny.sources(*sources(tiny.config())), [[1]] * 4)
        numbers["last ties as on the CPU"] = ", ".join(
            str(count) for count in COUNTS if is_ranked(batch.step(np.ones(4, np.int64), count), row, count)
        )


def is_ranked(found: Any, row: np.ndarray, count: int) -> bool:
    """Check the order of candidates; return whether ties for the last place equal the CPU's."""
    expected = ranked(row)[:count]
    for ids, logits in zip(found.token_ids, found.logits, strict=True):
        np.testing.assert_array_equal(logits, row[expected])
        np.testing.assert_array_equal(row[ids], logits)
        above = logits > logits[-1]
        np.testing.assert_array_equal(ids[above], expected[above])
        assert (np.diff(ids[~above]) > 0).all(), "equal logits are not in order of id"
    return bool((found.token_ids == expected).all())
