"""Compare engines and ONNX Runtime CUDA with PyTorch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.job import Job, Numbers
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import Device, Variant
from tfexport.errors import EngineError
from tfexport.model.load import load
from tfexport.precision import CALIBRATED, Precision
from tfexport.tensorrt.config import EngineConfig, Target
from tfexport.verify import Report, VerifyConfig, verify_bundle

PRESETS = ("tiny", "paper-base", "notebook-000", "notebook-001", "notebook-002", "notebook-003", "notebook-004")
ENCODER_ALONE = "notebook-002"
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
VARIANTS: tuple[Variant, ...] = ("static", "concat")
TEXTS = ["Dienstag, 3. März 2026", "15 de septiembre de 2001", "le 14 juillet 1989", "2026年3月3日火曜日"]


def rtx_accepts(job: Job) -> None:
    """Load the default engine of TensorRT-RTX and one for this GPU, even if tfexport refuses them."""
    from tfexport.tensorrt._library import PORTABLE
    from tfexport.tensorrt.cuda import need_gpu
    from tfexport.tensorrt.pipeline import build_engines
    from tfexport.tensorrt.store import load_engine

    capability = need_gpu().compute_capability
    wanted: tuple[str, ...]
    # Named, because tfexport builds for the local GPU by default.
    for what, wanted in (("default engine", PORTABLE), (f"engine for only {capability}", (capability,))):
        config = EngineConfig(target="tensorrt-rtx", precision="fp16", compute_capabilities=wanted)

        def check(numbers: Numbers, config: EngineConfig = config) -> None:
            bundle = job.copy("rtx-accepts", job.bundle("dates"), engines=False)
            engine = build_engines(bundle, config)
            try:
                numbers["tfexport loads"] = ", ".join(load_engine(open_bundle(bundle)).plans)
            except EngineError as error:
                numbers["tfexport refuses"] = str(error)
            numbers["the library says"] = library_takes((engine.path / "encoder.plan").read_bytes())

        job.check(what, check, EngineError)


def library_takes(plan: bytes) -> str:
    """Load a plan with TensorRT-RTX and return its validity; raise `EngineError` with the library's reason."""
    from tfexport.tensorrt._library import load_library

    library = load_library("tensorrt-rtx")
    log = library.listen()
    runtime = library.runtime(log)
    validity, diagnostics = runtime.get_engine_validity(plan)
    output = f"{library.version}: validity {validity}, diagnostics {diagnostics}"
    if runtime.deserialize_cuda_engine(plan) is None:
        raise EngineError(f"{output}; {' | '.join(log.lines()) or 'nothing in the log'}")
    return output


def dates(job: Job, target: Target) -> None:
    """The trained model in both variants and all precisions, on random input and in words."""
    bundle = job.bundle("dates")
    for variant, precision in itertools.product(VARIANTS, PRECISIONS):
        name = parity(job, target, "dates", variant, precision, samples=64)
        if name:
            check = functools.partial(read_dates, bundle, backend="trt", engine=name)
            job.check(f"dates in words, {variant} {precision}", check)


def weights(job: Job, target: Target) -> None:
    """The trained model with other weights than its own: it reads dates as ever."""
    bundle = job.copy("weights", job.bundle("dates"), engines=False)
    for narrow in ("int8", "int4"):
        name = job.engine(bundle, target, "static", "fp16", weights=narrow)
        if name:
            check = functools.partial(read_dates, bundle, backend="trt", engine=name)
            job.check(f"dates in words, fp16, weights {narrow}", check)


def calibrated(job: Job, target: Target) -> None:
    """The trained model in int8 and float8, whose plans ONNX Runtime on the CPU computes too."""
    for precision in CALIBRATED:
        path = job.bundle("dates", precision)
        name = job.engine(path, target, "static", None)
        if name:
            check = functools.partial(read_dates, path, backend="trt", engine=name)
            job.check(f"dates in words, {precision}", check)


def presets(job: Job, target: Target) -> None:
    """Random presets: every one in the static variant first, in fp32 before half precision."""
    for variant in VARIANTS:
        for precision in PRECISIONS:
            for name in PRESETS:
                if name != ENCODER_ALONE:
                    parity(job, target, name, variant, precision, samples=16)
                elif variant == "static":
                    parity(job, target, name, None, precision, samples=16)


def parity(
    job: Job, target: Target, source: str, variant: Variant | None, precision: Precision, samples: int
) -> str | None:
    """Build engines and compare them with PyTorch; return their name."""
    bundle = job.bundle(source)
    name = job.engine(bundle, target, variant, precision)
    if name:
        config = VerifyConfig(samples=samples)
        verify = functools.partial(verify_bundle, bundle, backend="trt", engine=name, config=config)
        job.check(f"{source} {variant or 'encoder'} {precision}", functools.partial(judge, verify))
    return name


def ort_cuda(job: Job, device: Device = "cuda") -> None:
    """The trained model on ONNX Runtime CUDA, both variants."""
    for precision in PRECISIONS:
        ort_parity(job, "dates", precision, device)
    job.check("dates in words", lambda numbers: read_dates(job.bundle("dates"), numbers, backend="ort", device=device))


def ort_presets(job: Job, device: Device = "cuda") -> None:
    """Random presets on ONNX Runtime CUDA, both variants."""
    for precision in PRECISIONS[:2]:
        for name in PRESETS:
            ort_parity(job, name, precision, device)


def ort_parity(job: Job, source: str, precision: Precision, device: Device) -> None:
    """Compare ONNX Runtime CUDA with PyTorch."""

    def verify() -> Report:
        return verify_bundle(job.bundle(source, precision), device=device, config=VerifyConfig(samples=32))

    job.check(f"{source} {precision}", functools.partial(judge, verify))


def judge(verify: Callable[[], Report], numbers: Numbers) -> None:
    """Take over what a report says, and fail when it did."""
    report = verify()
    numbers["errors"] = ", ".join(f"{check.stage} {check.error:.1e}" for check in report.numbers)
    numbers["exact"] = ", ".join(f"{r.stage} {r.method} {r.exact}+{r.ties}/{r.sequences}" for r in report.decodes)
    if not report.passed:
        raise AssertionError("; ".join(report.problems()))


def read_dates(bundle: Path, numbers: Numbers, **options: Any) -> None:
    """Read some dates, greedily and with beams, and fail unless ONNX Runtime on the CPU reads the same."""
    for beams in (1, 4):
        texts = []
        for chosen in ({"backend": "ort"}, options):
            with load(bundle, **chosen) as model:
                texts.append([result.text for result in model.generate(TEXTS, num_beams=beams)])
        assert texts[1] == texts[0], f"num_beams {beams}: {texts[1]}, expected {texts[0]}"
        numbers["texts"] = "; ".join(texts[1])
