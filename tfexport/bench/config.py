"""Configure a measurement: scenario, sizes and duration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from tfexport.config import Config
from tfexport.contract import Device, Form, ModelSpec
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.generation import DecodeConfig
from tfexport.runtime.cpu import MAX_THREADS
from tfexport.runtime.registry import AUTO, names
from tfexport.serve.config import ServingConfig

Scenario = Literal["single", "offline", "server", "sweep"]

# Every request is recorded until the end, so their number is limited.
MAX_REQUESTS = 100_000
MAX_CELLS = 100
_BATCH_SIZES: dict[Scenario, tuple[int, ...]] = {
    "single": (1,),
    "offline": (32,),
    "server": (ServingConfig.slots,),
    "sweep": (1, 2, 4, 8, 16, 32),
}
_DURATION_S: dict[Scenario, float] = {"single": 5.0, "offline": 5.0, "server": 8.0, "sweep": 1.0}
_SOURCE_LENGTH, _TARGET_LENGTH = 32, 64


@dataclass(frozen=True)
class Cell:
    """One combination of sizes.

    Attributes:
        batch_size: sources decoded together, or slots in the server scenario; None if a running server decides.
        source_length: tokens of each random source; None for texts of a file.
        target_length: new tokens of each source, exactly; None to decode until the text ends.
    """

    batch_size: int | None
    source_length: int | None
    target_length: int | None


class BenchConfig(Config, subject="bench"):
    """How to measure a bundle.

    `resolve` fills in empty sizes and the duration, in seconds per process and cell. Several sizes make a sweep over
    all combinations. `device`, `form`, `threads`, `engine` and `trusted_keys` are those of `tfexport.load`.

    Server scenario: without a `rate` in requests per second, the highest rate is searched at which the 99th percentile
    of the latencies is at most `goal_p99` milliseconds. Goodput counts answers within `goal_ms`. With `url`, a running
    server and its `model` are measured, with the bearer token in `token_file`.
    """

    scenario: Scenario = "single"
    backend: str = AUTO
    device: Device = "cpu"
    form: Form | None = None
    threads: int | Literal["auto"] = AUTO
    engine: str | None = None
    trusted_keys: tuple[str, ...] = ()
    batch_size: tuple[int, ...] = ()
    source_length: tuple[int, ...] = ()
    target_length: tuple[int, ...] = ()
    num_beams: int = 1
    rate: float | None = None
    goal_p99: float | None = None
    goal_ms: float | None = None
    slots: int | None = None
    url: str | None = None
    model: str | None = None
    token_file: str | None = None
    duration: float | None = None
    processes: int = 3
    seed: int = 0

    def _problems(self) -> list[str]:
        serving = self._server_problems() if self.scenario == "server" else self._problems_elsewhere()
        return [*self._range_problems(), *self._scenario_problems(), *serving]

    def _range_problems(self) -> list[str]:
        most = {"batch_size": 4096, "source_length": 1_000_000, "target_length": 1_000_000}
        problems = [
            f"{name} is {size}, expected 1 to {limit}"
            for name, limit in most.items()
            for size in getattr(self, name)
            if not 1 <= size <= limit
        ]
        problems += [
            f"{name} is {value}, expected {low} to {high}"
            for name, low, high in (
                ("num_beams", 1, 64),
                ("rate", 0.01, 100_000),
                ("goal_p99", 0.1, 3_600_000),
                ("goal_ms", 0.1, 3_600_000),
                ("slots", 1, 4096),
                ("duration", 0.1, 600),
                ("processes", 1, 20),
            )
            if (value := getattr(self, name)) is not None and not low <= value <= high
        ]
        if self.threads != AUTO and not 1 <= self.threads <= MAX_THREADS:
            problems.append(f"threads is {self.threads}, expected 1 to {MAX_THREADS}, or 'auto'")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}, expected 0 or more")
        if self.backend not in names():
            problems.append(f"backend is {self.backend!r}, expected one of {', '.join(map(repr, names()))}")
        return problems

    def _scenario_problems(self) -> list[str]:
        problems = []
        if self.scenario == "single" and self.batch_size not in ((), (1,)):
            problems.append("batch_size is given, but single runs one request at a time; use --scenario offline")
        problems += [
            f"{name} has {len(values)} values, expected one; use --scenario sweep"
            for name in ("batch_size", "source_length", "target_length")
            if len(values := getattr(self, name)) > 1 and self.scenario != "sweep"
        ]
        return problems

    def _server_problems(self) -> list[str]:
        problems = []
        if self.rate is None and self.goal_p99 is None:
            problems.append(
                "the server scenario needs a rate of requests; give --rate, such as --rate 20, or --goal-p99, a bound "
                "in milliseconds to search the highest rate for"
            )
        if self.batch_size not in ((), (self.slots,)):
            problems.append("batch_size is given, but a server has slots instead; use --slots")
        if self.url is not None:
            problems += self._url_problems(self.url)
        else:
            problems += [
                f"{name} is given without a server; give --url, or leave it out"
                for name in ("model", "token_file")
                if getattr(self, name) is not None
            ]
        return problems

    def _url_problems(self, url: str) -> list[str]:
        parts = urlsplit(url)
        problems = [
            f"{name} is given, but the server at --url has its own; leave it out"
            for name in ("form", "threads", "engine", "slots")
            if getattr(self, name) not in (None, AUTO)
        ]
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            problems.append(f"url is {shortened(url)}, expected an address such as http://127.0.0.1:8000")
        return problems

    def _problems_elsewhere(self) -> list[str]:
        return [
            f"{name} is only valid in the server scenario, not in {self.scenario}; leave it out"
            for name in ("rate", "goal_p99", "goal_ms", "slots", "url", "model", "token_file")
            if getattr(self, name) is not None
        ]

    @property
    def cells(self) -> list[Cell]:
        """Every combination of sizes of a resolved configuration."""
        return [
            Cell(batch, source, target)
            for source in self.source_length or (None,)
            for target in self.target_length or (None,)
            for batch in self.batch_size or (None,)
        ]

    @property
    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of `tfexport.load`."""
        options = {name: getattr(self, name) for name in ("backend", "form", "threads", "device", "engine")}
        return {**options, "trusted_keys": self.trusted_keys or None}

    def decoding(self, cell: Cell) -> DecodeConfig:
        """Return how to decode a cell: exactly its target length, or until the end of the text."""
        return DecodeConfig(
            num_beams=self.num_beams, max_new_tokens=cell.target_length, min_new_tokens=cell.target_length or 0
        )


def resolve(config: BenchConfig, spec: ModelSpec | None, *, has_texts: bool) -> BenchConfig:
    """Fill in what was not given, within the limits of a model.

    Args:
        config: as given.
        spec: of the bundle; None for a server whose bundle is not here, which needs texts.
        has_texts: sources come from a file.

    Raises:
        ConfigError: lists every size above a limit.
    """
    batch_size = (config.slots,) if config.slots else _BATCH_SIZES[config.scenario]
    source_limit, target_limit = (spec.max_source_length, spec.max_target_length) if spec else (None, None)
    resolved = dataclasses.replace(
        config,
        batch_size=config.batch_size or (() if config.url else batch_size),
        slots=batch_size[0] if config.scenario == "server" and not config.url else None,
        source_length=config.source_length or _length(_SOURCE_LENGTH, source_limit, has_texts),
        target_length=config.target_length or _length(_TARGET_LENGTH, target_limit, has_texts),
        goal_ms=config.goal_ms or config.goal_p99,
        duration=config.duration or _DURATION_S[config.scenario],
    )
    problems = [] if spec is None else _above_limits(resolved, spec)
    if has_texts and config.source_length:
        problems.append("source_length is given, but --input has texts of their own length; leave one of them out")
    if len(resolved.cells) > MAX_CELLS:
        problems.append(f"the sweep has {len(resolved.cells)} combinations, the limit is {MAX_CELLS}; give fewer sizes")
    requests = (resolved.rate or 0) * (resolved.duration or 0)
    if requests > MAX_REQUESTS:
        problems.append(f"rate · duration is {requests:.0f} requests, the limit is {MAX_REQUESTS}; lower one of them")
    raise_all(ConfigError, "bench", problems)
    return resolved


def _length(wanted: int, limit: int | None, has_texts: bool) -> tuple[int, ...]:
    return () if has_texts or limit is None else (min(wanted, limit),)


def _above_limits(config: BenchConfig, spec: ModelSpec) -> list[str]:
    return [
        f"{name} is {length}, the limit of the bundle is {limit}; lower --{name.replace('_', '-')}"
        for name, limit in (("source_length", spec.max_source_length), ("target_length", spec.max_target_length))
        for length in getattr(config, name)
        if length > limit
    ]
