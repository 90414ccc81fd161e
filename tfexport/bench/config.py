"""Configure a measurement: scenario, sizes and duration."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from tfexport.config import Config, Count, Ge, Help, Le
from tfexport.contract import Device, Form, ModelSpec
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.generation import DecodeConfig
from tfexport.runtime.cpu import MAX_THREADS
from tfexport.runtime.registry import AUTO, names
from tfexport.serve.config import ServingConfig

Scenario = Literal["single", "offline", "server", "sweep"]
Length = Annotated[int, Ge(1), Le(1_000_000)]
Rows = Annotated[int, Ge(1), Le(4096)]

# All requests are kept in memory until the end.
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
        batch_size: sources per batch, or slots in the server scenario; None if a running server decides.
        source_length: tokens of each random source; None for texts from a file.
        target_length: exact number of new tokens per source; None to decode until the end of the text.
    """

    batch_size: int | None
    source_length: int | None
    target_length: int | None


class BenchConfig(Config, subject="bench"):
    """Settings of a measurement.

    `resolve` fills in empty sizes and the duration. Several sizes are a sweep over all combinations.
    The fields without a help text are options of `tfexport.load`.
    """

    scenario: Annotated[
        Scenario,
        Help("Measure single requests, batches, requests that arrive at --rate, or all combinations of sizes."),
    ] = "single"
    backend: str = AUTO
    device: Device = "cpu"
    form: Form | None = None
    threads: Annotated[int, Ge(1), Le(MAX_THREADS)] | Literal["auto"] = AUTO
    engine: str | None = None
    trusted_keys: tuple[str, ...] = ()
    batch_size: Annotated[tuple[Rows, ...], Help("Texts decoded together.")] = ()
    source_length: Annotated[tuple[Length, ...], Help("Tokens of each random source.")] = ()
    target_length: Annotated[tuple[Length, ...], Help("New tokens of each text, exactly.")] = ()
    num_beams: Annotated[int, Ge(1), Le(64), Help("Beams of beam search; 1 is greedy.")] = 1
    rate: Annotated[float | None, Ge(0.01), Le(100_000), Help("Requests a second of the server scenario.")] = None
    goal_ms: Annotated[float | None, Ge(0.1), Le(3_600_000), Help("Goodput counts answers within this many ms.")] = None
    slots: Annotated[Rows | None, Help("Rows that the server scenario decodes at once.")] = None
    url: Annotated[str | None, Help("Measure a running server, such as http://127.0.0.1:8000.")] = None
    model: Annotated[str | None, Help("Name of its model, if it has several.")] = None
    token_file: Annotated[str | None, Help("File whose first line is the bearer token of the server.")] = None
    duration: Annotated[
        float | None, Ge(0.1), Le(600), Help("Seconds to measure each combination in each process.")
    ] = None
    processes: Annotated[int, Ge(1), Le(20), Help("Fresh processes to measure in, one after another.")] = 3
    seed: Annotated[Count, Help("Seed of the random sources and arrivals.")] = 0

    def _problems(self) -> list[str]:
        problems = []
        if self.backend not in names():
            problems.append(f"backend is {self.backend!r}, expected one of {', '.join(map(repr, names()))}")
        if self.scenario == "single" and self.batch_size not in ((), (1,)):
            problems.append("batch_size is given, but single runs one request at a time; use --scenario offline")
        problems += [
            f"{name} has {len(values)} values, expected one; use --scenario sweep"
            for name in ("batch_size", "source_length", "target_length")
            if len(values := getattr(self, name)) > 1 and self.scenario != "sweep"
        ]
        if self.scenario == "server":
            return [*problems, *self._server_problems()]
        only = "only valid in the server scenario"
        return [*problems, *self._given("rate", "goal_ms", "slots", "url", "model", "token_file", why=only)]

    def _server_problems(self) -> list[str]:
        problems = []
        if self.rate is None:
            problems.append("the server scenario needs a rate of requests; give --rate, such as --rate 20")
        if self.batch_size not in ((), (self.slots,)):
            problems.append("batch_size is given, but a server has slots instead; use --slots")
        if self.url is None:
            return [*problems, *self._given("model", "token_file", why="only valid with --url")]
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            problems.append(f"url is {shortened(self.url)}, expected an address such as http://127.0.0.1:8000")
        return [*problems, *self._given("form", "threads", "engine", "slots", why="not valid with --url")]

    def _given(self, *fields: str, why: str) -> list[str]:
        given = [name for name in fields if getattr(self, name) not in (None, AUTO)]
        return [f"{name} is {why}; leave it out" for name in given]

    @property
    def cells(self) -> list[Cell]:
        """All combinations of sizes of a resolved configuration."""
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
        """Return the decoding options of a cell."""
        length = cell.target_length
        return DecodeConfig(num_beams=self.num_beams, max_new_tokens=length, min_new_tokens=length or 0)


def resolve(config: BenchConfig, spec: ModelSpec | None, *, has_texts: bool) -> BenchConfig:
    """Fill in missing settings, within the limits of a model.

    `spec` is None for a server without a local bundle, which needs texts.

    Raises:
        ConfigError: lists every size above a limit.
    """
    batch_size = (config.slots,) if config.slots else _BATCH_SIZES[config.scenario]
    limits = {} if spec is None else {"source_length": spec.max_source_length, "target_length": spec.max_target_length}
    lengths = {"source_length": _SOURCE_LENGTH, "target_length": _TARGET_LENGTH}
    usual = {name: () if has_texts else (min(lengths[name], limit),) for name, limit in limits.items()}
    resolved = dataclasses.replace(
        config,
        batch_size=config.batch_size or (() if config.url else batch_size),
        slots=batch_size[0] if config.scenario == "server" and not config.url else None,
        source_length=config.source_length or usual.get("source_length", ()),
        target_length=config.target_length or usual.get("target_length", ()),
        duration=config.duration or _DURATION_S[config.scenario],
    )
    problems = [
        f"{name} is {length}, the limit of the bundle is {limit}; lower --{name.replace('_', '-')}"
        for name, limit in limits.items()
        for length in getattr(resolved, name)
        if length > limit
    ]
    if has_texts and config.source_length:
        problems.append("source_length is given, but --input has texts of their own length; leave one of them out")
    if len(resolved.cells) > MAX_CELLS:
        problems.append(f"the sweep has {len(resolved.cells)} combinations, the limit is {MAX_CELLS}; give fewer sizes")
    requests = (resolved.rate or 0) * (resolved.duration or 0)
    if requests > MAX_REQUESTS:
        problems.append(f"rate · duration is {requests:.0f} requests, the limit is {MAX_REQUESTS}; lower one of them")
    raise_all(ConfigError, "bench", problems)
    return resolved
