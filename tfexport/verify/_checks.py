"""Compare every stage with the eager model: first logits, then whole decodes.

The stages are the eager model with a cache, and each graph or engine. The float64 run measures the rounding error of
float32; tolerances are relative to it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import numpy as np

from tfexport._io.signature import TrustedKeys
from tfexport.bundle.bundle import open_bundle
from tfexport.config import Config, Count, Ge, Help, Le
from tfexport.contract import Device
from tfexport.errors import ConfigError, ParityError, raised_by
from tfexport.model.load import load_tokenizer
from tfexport.nn.eager import EagerModel
from tfexport.precision import FORMATS
from tfexport.runtime import registry
from tfexport.runtime.eager import EagerSession, full_outputs
from tfexport.runtime.registry import Backend, Graphs, LoadOptions
from tfexport.runtime.session import Aligns, Floats, Mask, Session, Verifies
from tfexport.runtime.shortlist import Shortlist
from tfexport.text.tokenizer import Tokenizer
from tfexport.verify._decodes import Stage, compare_all_decodes, compare_long_decodes, compare_own_loop, recorded_texts
from tfexport.verify._numbers import (
    Batch,
    compare,
    long_batches,
    long_lengths,
    random_batches,
    random_sources,
    step_logits,
    verified_logits,
)
from tfexport.verify._reference import reference_of
from tfexport.verify._report import Decodes, Numbers, Report

Named = tuple[str, Session]
Reporter = Callable[[str], None]


class VerifyConfig(Config, subject="verify"):
    """The size of a verification.

    Numbers are compared for at most 64 samples, and for rows up to the length limits.
    """

    samples: Annotated[int, Ge(1), Le(1_000_000), Help("Sequences to decode with each decoder variant and method.")] = (
        100
    )
    seed: Annotated[Count, Help("Of the random sequences.")] = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the size of the verification that every export runs."""
        return cls(samples=16)


@dataclass(frozen=True)
class Stages:
    """The reference and the graphs to compare with it."""

    model: EagerModel
    graphs: Graphs
    reference: str = "the eager model"  # describes the model in the report
    tokenizer: Tokenizer | None = None  # has the recorded texts


def verify_bundle(
    path: Path,
    *,
    against: str | Path | None = None,
    config: VerifyConfig | None = None,
    backend: str | None = None,
    device: Device = "cpu",
    engine: str | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    report: Reporter = lambda line: None,
) -> Report:
    """Compare every stage of a bundle with the eager model.

    Args:
        path: bundle.
        against: model directory of the reference, or PACKAGE.MODULE:FACTORY of a user's own module, whose code is
            imported and run; None uses the bundle's own weights, which for fp16 and bf16 are rounded.
        backend: "ort" compares every decoder variant that the device runs, "trt" an engine; None uses the backend that
            exports are verified on.
        config: the size of the verification.
        device: device that runs the graphs.
        engine: name of the engine; None for the only usable one.
        trusted_keys: files of public keys, one of which must have signed bundle and engine; None accepts every bundle.
        report: receives progress lines.
    """
    compared = _backend(backend)
    bundle = open_bundle(path, trusted_keys=None if trusted_keys is None else TrustedKeys.read(trusted_keys))
    model, precision = reference_of(bundle, None if against is None else str(against)), bundle.manifest.spec.precision
    is_rounded = against is None and precision != "fp32"
    reference = "the eager model" + (f" with the bundle's {precision} weights" if is_rounded else "")
    model = replace(model, author=model.author or bundle.manifest.author)
    stages = Stages(model, Graphs.of(bundle), reference, load_tokenizer(bundle))
    return _verify(stages, compared, LoadOptions(device=device, engine=engine), config or VerifyConfig(), report)


def verify_stages(stages: Stages, config: VerifyConfig, *, report: Reporter = lambda line: None) -> Report:
    """Compare every stage with the eager model, in numbers and in whole decodes."""
    return _verify(stages, _backend(None), LoadOptions(), config, report)


def _backend(name: str | None) -> Backend:
    comparable = registry.comparable()
    backend = comparable[0] if name is None else registry.get(name)
    if backend not in comparable:
        expected = ", ".join(repr(each.name) for each in comparable)
        raise ConfigError(f"verify: backend {name} is the eager model itself, expected one of {expected}")
    return backend


def _verify(stages: Stages, backend: Backend, options: LoadOptions, config: VerifyConfig, report: Reporter) -> Report:
    sessions: list[Named] = []
    with ExitStack() as stack:  # closes the sessions, even if opening the next one fails
        for stage, session in backend.load(options).parity_sessions(stages.graphs, options):
            stack.callback(session.close)
            sessions.append((stage, session))
        return _compare(stages, sessions, config, report)


def _compare(stages: Stages, sessions: Sequence[Named], config: VerifyConfig, report: Reporter) -> Report:
    rng = np.random.default_rng(config.seed)
    # Engines may have lower limits than graphs.
    spec = replace(
        stages.graphs.spec,
        max_source_length=min(session.spec.max_source_length for _, session in sessions),
        max_target_length=min(session.spec.max_target_length for _, session in sessions),
    )
    eager = EagerSession(
        stages.model.module,
        replace(spec, precision="fp32"),
        alignment=stages.graphs.alignment,
        shortlist=stages.graphs.shortlist(),
    )
    max_rows = min((s.limits.rows.most for _, s in sessions if s.limits.rows.most), default=None)
    batches = random_batches(spec, min(config.samples, 64), rng, max_rows)
    sources = random_sources(spec, config.samples, rng)
    long = long_batches(spec, rng)
    numbers: list[Numbers] = []
    decodes: list[Decodes] = []
    compared: list[Stage]
    if not spec.has_decoder:
        numbers += _encoder_numbers(stages.model, sessions[0], [*batches, *long], report)
        compared = [Stage("eager", eager, 0.0)]
    else:
        checks = _Numbers(stages.model, eager, [*batches, *long], report)
        cached = checks.logits("eager cached", eager)
        logits = [checks.logits(*named) for named in sessions]
        numbers = [*checks.rounding, cached, *logits, *checks.speculation(sessions), *checks.alignment(sessions)]
        # Nothing can be decoded from NaN, and its check has failed already.
        finite = [Stage(*named, n.worst) for named, n in zip(sessions, logits, strict=True) if math.isfinite(n.error)]
        decodes = compare_all_decodes(eager, finite, sources, report) if finite else []
        decodes += compare_long_decodes(eager, finite, long, report) if finite else []
        if generate := stages.model.generate:
            sources += [batch.first for batch in long]
            report(f"decoding {len(sources)} sequences: your own generation loop")
            decodes += compare_own_loop(generate, eager, finite, sources)
        compared = [Stage("eager", eager, max((number.worst for number in checks.rounding), default=0.0)), *finite]
    if stages.tokenizer and stages.tokenizer.text.samples:
        for stage in compared:
            report(f"decoding {stages.tokenizer.text.proof}: {stage.name}")
            decodes.append(recorded_texts(stage, stages.tokenizer, eager))
    source_tokens, target_tokens = long_lengths(spec)[-1]
    return Report(
        stages.reference,
        config.samples,
        config.seed,
        tuple(numbers),
        tuple(decodes),
        stages.model.author,
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        is_capped=source_tokens < spec.max_source_length or target_tokens < spec.max_target_length,
    )


def _encoder_numbers(model: EagerModel, named: Named, batches: Sequence[Batch], report: Reporter) -> Iterator[Numbers]:
    (stage, session), every = named, [batch.sources for batch in batches]
    report(f"comparing hidden states: {stage}")
    expected = [full_outputs(model, sources) * sources.mask[:, :, None] for sources in every]
    got = [session.hidden_states(sources) * sources.mask[:, :, None] for sources in every]
    yield compare(stage, expected, got, FORMATS[session.accuracy].tolerance, "states")
    if session.spec.head != "none":
        report(f"comparing logits: {stage}")
        eager = EagerSession(model.module, replace(session.spec, precision="fp32"))
        expected, got = ([_kept(each.logits(s), s.mask) for s in every] for each in (eager, session))
        yield compare(stage, expected, got, FORMATS[session.accuracy].tolerance)


def _kept(logits: Floats, mask: Mask) -> Floats:
    return logits[:, None] if logits.ndim == 2 else logits * mask[:, :, None]


class _Numbers:
    """Compare numbers over the same batches; the eager outputs are computed once."""

    def __init__(self, model: EagerModel, eager: EagerSession, batches: Sequence[Batch], report: Reporter) -> None:
        self._eager, self._batches, self._report = eager, batches, report
        report("comparing logits: eager full and cached")
        self._expected = [_all_positions(model, batch, eager.shortlist) for batch in batches]
        self.rounding: list[Numbers] = []
        try:
            several = (0, len(batches) - 1)  # the largest batch, and the longest row
            wide = [_all_positions(model.double(), batches[number], eager.shortlist) for number in several]
        except Exception as error:  # noqa: BLE001 - a user's own module may not run in float64
            report(f"the reference does not run in float64 ({type(error).__name__}): tolerances exclude rounding")
        else:
            self.rounding.append(compare("eager float64", wide, [self._expected[number] for number in several], 1e-3))

    def logits(self, stage: str, session: Session) -> Numbers:
        self._report(f"comparing logits: {stage}")
        pairs = zip(self._batches, self._expected, strict=True)
        got = [step_logits(session, batch, logits) for batch, logits in pairs]
        return compare(stage, self._expected, got, self._tolerance(session))

    def speculation(self, sessions: Sequence[Named]) -> Iterator[Numbers]:
        for stage, session in sessions:
            running = session.batch()
            if isinstance(running, Verifies) and running.can_verify:
                self._report(f"comparing several tokens in a step: {stage}")
                got = [verified_logits(session, batch) for batch in self._batches]
                yield compare(stage, self._expected, got, self._tolerance(session), "speculation")

    def alignment(self, sessions: Sequence[Named]) -> Iterator[Numbers]:
        """Compare the alignment of one session, because all variants share its graph."""
        for stage, session in sessions:
            if isinstance(session, Aligns) and session.has_alignment:
                self._report(f"comparing the alignment: {stage}")
                expected = [_alignment(self._eager, batch) for batch in self._batches]
                # The last entry, the sum over source tokens, detects weight on padding.
                for array, batch in zip(expected, self._batches, strict=True):
                    array[:, :, :-1] *= batch.sources.mask[:, None]
                    array[:, :, -1] = 1
                got = [_alignment(session, batch) for batch in self._batches]
                yield compare(stage, expected, got, self._tolerance(session), "alignment")
                return

    def _tolerance(self, session: Session) -> float:
        return max(FORMATS[session.accuracy].tolerance, *(10 * number.error for number in self.rounding), 0.0)


def _all_positions(model: EagerModel, batch: Batch, shortlist: Shortlist | None) -> Floats:
    try:
        outputs = full_outputs(model, batch.sources, batch.target_ids)
    except Exception as error:
        lengths = f"{batch.sources.source_len} source and {batch.target_ids.shape[1]} target tokens"
        remedy = "lower max_source_length or max_target_length of its spec, or correct its code"
        raise ParityError(f"the reference fails for {lengths} ({raised_by(error)}); {remedy}") from error
    found = outputs[:, batch.prefill - 1 :].copy()  # a view would keep all positions in memory
    if shortlist is not None:
        found *= np.array(shortlist.masks(batch.sources))[:, None]
    return found


def _alignment(session: Aligns, batch: Batch) -> Floats:
    found = session.align(batch.sources, batch.target_ids)
    sums: Floats = np.where(batch.sources.mask[:, None], found, 0).sum(2, keepdims=True, dtype=np.float32)
    return np.concatenate((found, sums), 2)
