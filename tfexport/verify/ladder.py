"""The ladder: eager full ↔ eager cached ↔ concat ↔ static ↔ contrib, or engines; then whole decodes.

Its foot is float64: what float32 itself loses on a model bounds what a stage may.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self, cast

import numpy as np

from tfexport._io.signature import TrustedKeys
from tfexport.bundle.bundle import open_bundle
from tfexport.config import Config, Count, Ge, Help, Le
from tfexport.contract import Device, ModelSpec
from tfexport.errors import ConfigError
from tfexport.model.load import load_tokenizer
from tfexport.nn.eager import EagerModel
from tfexport.runtime import registry
from tfexport.runtime.eager import EagerSession, full_outputs
from tfexport.runtime.registry import Backend, Graphs, LoadOptions
from tfexport.runtime.session import Aligns, Floats, Session, Verifies
from tfexport.text.tokenizer import Tokenizer
from tfexport.verify.divergence import measure_divergence
from tfexport.verify.numbers import Batch, compare, random_batches, random_sources, step_logits, verified_logits
from tfexport.verify.recorded import recorded_texts
from tfexport.verify.reference import reference_of
from tfexport.verify.report import TOLERANCE, Decodes, Numbers, Report
from tfexport.verify.texts import METHODS, batch_invariance, compare_decodes, decode_best

Named = tuple[str, Session]


class VerifyConfig(Config, subject="verify"):
    """How much is tried.

    `samples` random sequences are decoded for each form and method, and at most
    as many compared in numbers.
    """

    samples: Annotated[int, Ge(1), Le(1_000_000), Help("Random sequences to decode for each form and method.")] = 100
    seed: Annotated[Count, Help("Of the random sequences.")] = 0

    @classmethod
    def quick(cls) -> Self:
        """Return what every export tries."""
        return cls(samples=16)


@dataclass(frozen=True)
class Stages:
    """What is compared.

    Attributes:
        model: the eager reference.
        graphs: of a bundle, written or still being made.
        reference: the eager model in words.
        tokenizer: with the texts that were recorded; None where there is none.
    """

    model: EagerModel
    graphs: Graphs
    reference: str = "the eager model"
    tokenizer: Tokenizer | None = None


def verify_bundle(
    path: Path,
    *,
    against: str | Path | None = None,
    config: VerifyConfig | None = None,
    backend: str | None = None,
    device: Device = "cpu",
    engine: str | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Climb the ladder for a bundle.

    Args:
        path: of the bundle.
        against: model directory of the reference, or PACKAGE.MODULE:FACTORY of a module of the user's own, whose code
            is imported and run; None takes the bundle's own weights, which for fp16 and bf16 are the rounded ones.
        config: how much is tried.
        backend: "ort" compares every form of the graphs that the device takes, "trt" an engine; None for the first,
            which exports are verified on.
        device: where graphs are computed.
        engine: name of the engine; None for the only one that may be used here.
        trusted_keys: files of public keys, one of which must have signed bundle and engine; None compares whosever.
        report: told what happens, a line at a time.

    Raises:
        BackendError: the backend cannot be used here, has no such device or engine, or failed.
        EngineError: the bundle has no such engine, or it may not be used here.
        BundleError: the bundle is damaged, carries no eager model and `against` is None, or has no form for the device.
        ConfigError: `against` is another model, the backend is none that is compared, or a key is none.
    """
    compared = comparable(backend)
    bundle = open_bundle(path, trusted_keys=None if trusted_keys is None else TrustedKeys.read(trusted_keys))
    model = reference_of(bundle, None if against is None else str(against))
    rounded = against is None and bundle.manifest.spec.precision != "fp32"
    words = "the eager model" + (f" with the bundle's {bundle.manifest.spec.precision} weights" if rounded else "")
    stages = Stages(model, Graphs.of(bundle), words, load_tokenizer(bundle))
    with _closing(compared.rungs(stages.graphs, LoadOptions(device=device, engine=engine))) as sessions:
        return _climb(stages, sessions, config or VerifyConfig(), report)


def verify_stages(stages: Stages, config: VerifyConfig, *, report: Callable[[str], None] = lambda line: None) -> Report:
    """Compare every stage with the eager model, first in numbers, then in whole decodes.

    Args:
        stages: the reference and the graphs.
        config: how much is tried.
        report: told what happens, a line at a time.

    Raises:
        BackendError: a graph does not load or run here.
    """
    with _closing(comparable().rungs(stages.graphs, LoadOptions())) as sessions:
        return _climb(stages, sessions, config, report)


def comparable(name: str | None = None) -> Backend:
    """Return the backend to compare; `name` None means the one that exports are verified on.

    Raises:
        ConfigError: there is no such backend, or it is the reference itself.
    """
    found = registry.comparable()
    if name is None or registry.get(name) in found:
        return registry.get(name) if name else found[0]
    names = ", ".join(repr(backend.name) for backend in found)
    raise ConfigError(f"verify: backend {name} is the eager model itself, expected one of {names}")


def _climb(stages: Stages, sessions: Sequence[Named], config: VerifyConfig, report: Callable[[str], None]) -> Report:
    spec, rng = _shortest(stages.graphs.spec, sessions), np.random.default_rng(config.seed)
    alignment = stages.graphs.alignment
    eager = EagerSession(stages.model.module, dataclasses.replace(spec, precision="fp32"), alignment=alignment)
    most_rows = min((s.limits.rows.most for _, s in sessions if s.limits.rows.most), default=None)
    batches = random_batches(spec, min(config.samples, 64), rng, most_rows)
    sources = random_sources(spec, config.samples, rng)
    if not spec.has_decoder:
        found = (_hidden_states(stages.model, sessions[0], batches, report),)
        texts = _recorded(stages.tokenizer, eager, [("eager", eager, 0.0)], report)
        return Report(stages.reference, config.samples, config.seed, found, tuple(texts))
    rounding, stepped = _numbers(stages.model, eager, sessions, batches, report)
    # Nothing can be decoded from NaN, and the rung that gave it has failed already.
    pairs = [pair for pair in zip(sessions, stepped[1:], strict=True) if math.isfinite(pair[1].error)]
    speculation = _speculation(stages.model, sessions, batches, rounding, report)
    numbers = [*rounding, *stepped, *speculation, *_alignment(eager, sessions, batches, rounding, report)]
    decodes = _decodes(eager, pairs, sources, report) if pairs else []
    rungs = [("eager", cast(Session, eager), max((number.worst for number in rounding), default=0.0))]
    rungs += [(stage, session, number.worst) for (stage, session), number in pairs]
    decodes += _recorded(stages.tokenizer, eager, rungs, report)
    return Report(stages.reference, config.samples, config.seed, tuple(numbers), tuple(decodes))


def _recorded(
    tokenizer: Tokenizer | None,
    eager: EagerSession,
    stages: Sequence[tuple[str, Session, float]],
    report: Callable[[str], None],
) -> list[Decodes]:
    """Compare each stage, which has a name and an error, with the texts that were recorded."""
    if tokenizer is None or not tokenizer.text.samples:
        return []
    rungs = []
    for stage, session, noise in stages:
        report(f"decoding {tokenizer.text.proof}: {stage}")
        rungs.append(recorded_texts(stage, session, tokenizer, eager, noise))
    return rungs


def _shortest(spec: ModelSpec, sessions: Sequence[Named]) -> ModelSpec:
    """Return the specification with the shortest lengths that any session takes: engines may take less than graphs."""
    names = ("max_source_length", "max_target_length")
    return dataclasses.replace(spec, **{name: min(getattr(s.spec, name) for _, s in sessions) for name in names})


@contextmanager
def _closing(opening: Iterator[Named]) -> Iterator[list[Named]]:
    """Open sessions one after the other; close those that were opened, also when the next cannot be."""
    sessions: list[Named] = []
    try:
        sessions.extend(opening)
        yield sessions
    finally:
        for _, session in sessions:
            session.close()


def _hidden_states(model: EagerModel, named: Named, batches: Sequence[Batch], report: Callable[[str], None]) -> Numbers:
    stage, session = named
    report(f"comparing hidden states: {stage}")

    def valid(array: Floats, batch: Batch) -> Floats:
        return array * batch.source_mask[:, :, None]

    expected = [valid(full_outputs(model, b.source_ids, b.source_mask), b) for b in batches]
    got = [valid(session.hidden_states(b.source_ids, b.source_mask), b) for b in batches]
    return compare(stage, expected, got, TOLERANCE[session.accuracy])


def _numbers(
    model: EagerModel,
    eager: EagerSession,
    sessions: Sequence[Named],
    batches: Sequence[Batch],
    report: Callable[[str], None],
) -> tuple[list[Numbers], list[Numbers]]:
    """Compare all positions at once in float64, where the model runs in it, and every stage step by step."""
    report("comparing logits: eager full and cached")
    expected = [_all_positions(model, batch) for batch in batches]
    rounding, rungs = _rounding(model, batches[0], expected[0], report), []
    stages = [("eager cached", cast(Session, eager)), *sessions]
    for stage, session in stages:
        report(f"comparing logits: {stage}")
        tolerance = _tolerance(session, rounding)
        got = [step_logits(session, batch, logits) for batch, logits in zip(batches, expected, strict=True)]
        rungs.append(compare(stage, expected, got, tolerance))
    return rounding, rungs


def _speculation(
    model: EagerModel,
    sessions: Sequence[Named],
    batches: Sequence[Batch],
    rounding: Sequence[Numbers],
    report: Callable[[str], None],
) -> list[Numbers]:
    """Compare several tokens that are read in one step, of one row, where a session can."""
    rungs = []
    for stage, session in sessions:
        running = session.batch()
        if isinstance(running, Verifies) and running.can_verify:
            report(f"comparing several tokens in a step: {stage}")
            expected = [_all_positions(model, batch) for batch in batches]
            got = [verified_logits(session, batch) for batch in batches]
            found = compare(stage, expected, got, _tolerance(session, rounding))
            rungs.append(dataclasses.replace(found, quantity="speculation"))
    return rungs


def _all_positions(model: EagerModel, batch: Batch) -> Floats:
    return full_outputs(model, batch.source_ids, batch.source_mask, batch.target_ids)[:, batch.prefill - 1 :]


def _rounding(model: EagerModel, batch: Batch, expected: Floats, report: Callable[[str], None]) -> list[Numbers]:
    """Measure what float32 itself loses; nothing where code of the user's own does not run in float64."""
    try:
        wide = _all_positions(model.double(), batch)
    except Exception as error:  # noqa: BLE001 - of the user's own code
        report(f"the reference does not run in float64, so nothing is allowed for rounding ({type(error).__name__})")
        return []
    return [compare("eager float64", [wide], [expected], 1e-3)]


def _tolerance(session: Session, rounding: Sequence[Numbers]) -> float:
    return max(TOLERANCE[session.accuracy], *(10 * number.error for number in rounding), 0.0)


def _alignment(
    eager: EagerSession,
    sessions: Sequence[Named],
    batches: Sequence[Batch],
    rounding: Sequence[Numbers],
    report: Callable[[str], None],
) -> list[Numbers]:
    """Compare the weights of the alignment, and with 1 their sums over what is no padding; all forms have one graph."""
    able = [(stage, session) for stage, session in sessions if isinstance(session, Aligns) and session.has_alignment]
    if not able:
        return []
    stage, session = able[0]
    report(f"comparing the alignment: {stage}")

    def weights(session: Aligns, batch: Batch) -> Floats:
        found = session.align(batch.source_ids, batch.source_mask, batch.target_ids)
        sums: Floats = np.where(batch.source_mask[:, None], found, 0).sum(2, keepdims=True, dtype=np.float32)
        return np.concatenate((found, sums), 2)

    expected = [weights(eager, batch) for batch in batches]
    for array, batch in zip(expected, batches, strict=True):
        array[:, :, :-1] *= batch.source_mask[:, None]
        array[:, :, -1] = 1
    tolerance = _tolerance(session, rounding)
    found = compare(stage, expected, [weights(session, batch) for batch in batches], tolerance)
    return [dataclasses.replace(found, quantity="alignment")]


def _decodes(
    eager: EagerSession,
    stages: Sequence[tuple[Named, Numbers]],
    sources: Sequence[Sequence[int]],
    report: Callable[[str], None],
) -> list[Decodes]:
    rungs = []
    for method, num_beams in METHODS.items():
        report(f"decoding {len(sources)} sequences, {method}: eager")
        expected = decode_best(eager, sources, num_beams, 8)
        for (stage, session), number in stages:
            if session.limits.rows.is_below(num_beams):
                report(f"{stage} takes {session.limits.rows.most} rows, too few for {method}")
                continue
            report(f"decoding {len(sources)} sequences, {method}: {stage}")
            got = decode_best(session, sources, num_beams, 8)
            is_exact = session.accuracy == "fp32"
            rungs.append(
                compare_decodes(
                    stage,
                    method,
                    eager,
                    sources,
                    expected,
                    got,
                    num_beams=num_beams,
                    noise=number.worst,
                    must_be_exact=is_exact,
                    divergence=None if is_exact else measure_divergence(eager, sources, expected, got),
                )
            )
    some = sources[: min(64, len(sources) // 2 + 1)]
    for (stage, session), number in stages:
        report(f"decoding {len(some)} sequences alone and in batches: {stage}")
        rungs.append(batch_invariance(stage, session, some, number.worst, eager))
    return rungs
