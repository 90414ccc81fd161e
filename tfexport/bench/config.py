"""Configure a measurement: scenario, sizes and duration."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from tfexport.config import Config, Count, Ge, Help, Le
from tfexport.contract import Device, ModelSpec, Variant
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
    """One combination of sizes."""

    batch_size: int | None  # slots in the server scenario; None if a running server decides
    source_length: int | None  # None for texts from a file
    target_length: int | None  # exact number of new tokens; None to decode until the end of the text


class BenchConfig(Config, subject="bench", former={"form": "variant"}):
    """Settings of a measurement; `resolve` fills in empty sizes and the duration."""

    scenario: Annotated[
        Scenario, Help("Measure single requests, batches, requests at --rate, or all combinations of sizes.")
    ] = "single"
    backend: str = AUTO  # fields without a help text are options of `tfexport.load`
    device: Device = "cpu"
    variant: Variant | None = None
    threads: Annotated[int, Ge(1), Le(MAX_THREADS)] | Literal["auto"] = AUTO
    engine: str | None = None
    trusted_keys: tuple[str, ...] = ()
    batch_size: Annotated[tuple[Rows, ...], Help("Texts in a batch.")] = ()
    source_length: Annotated[tuple[Length, ...], Help("Tokens of each random source, or positions of features.")] = ()
    target_length: Annotated[tuple[Length, ...], Help("Exact number of new tokens per text.")] = ()
    num_beams: Annotated[int, Ge(1), Le(64), Help("Beams of beam search; 1 is greedy.")] = 1
    rate: Annotated[float | None, Ge(0.01), Le(100_000), Help("Requests per second of the server scenario.")] = None
    goal_ms: Annotated[float | None, Ge(0.1), Le(3_600_000), Help("Maximum latency in ms to count as goodput.")] = None
    slots: Annotated[Rows | None, Help("Maximum rows in a decoder step of the server scenario.")] = None
    url: Annotated[str | None, Help("Measure a running server, such as http://127.0.0.1:8000.")] = None
    model: Annotated[str | None, Help("Name of the server's model, if it has several.")] = None
    token_file: Annotated[str | None, Help("File whose first line is the bearer token of the server.")] = None
    duration: Annotated[float | None, Ge(0.1), Le(600), Help("Seconds per combination of sizes and process.")] = None
    processes: Annotated[int, Ge(1), Le(20), Help("Number of new processes that measure, one after another.")] = 3
    seed: Annotated[Count, Help("Seed of the random sources and arrivals.")] = 0

    def _problems(self) -> Iterator[str]:
        if self.backend not in names():
            yield f"backend is {self.backend!r}, expected one of {', '.join(map(repr, names()))}"
        if self.scenario == "single" and self.batch_size not in ((), (1,)):
            yield "batch_size is set, but single runs one request at a time; use --scenario offline"
        for name in ("batch_size", "source_length", "target_length"):
            if len(values := getattr(self, name)) > 1 and self.scenario != "sweep":
                yield f"{name} has {len(values)} values, expected one; use --scenario sweep"
        if self.scenario == "server":
            yield from self._server_problems()
        else:
            why = "only valid in the server scenario"
            yield from self._unused("rate", "goal_ms", "slots", "url", "model", "token_file", why=why)

    def _server_problems(self) -> Iterator[str]:
        if self.rate is None:
            yield "the server scenario needs a rate of requests; set --rate, such as --rate 20"
        if self.batch_size not in ((), (self.slots,)):
            yield "batch_size is set, but a server has slots instead; use --slots"
        if self.url is None:
            yield from self._unused("model", "token_file", why="only valid with --url")
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            yield f"url is {shortened(self.url)}, expected an address such as http://127.0.0.1:8000"
        yield from self._unused("variant", "threads", "engine", "slots", why="not valid with --url")

    def _unused(self, *fields: str, why: str) -> list[str]:
        return [f"{name} is {why}; omit it" for name in fields if getattr(self, name) not in (None, AUTO)]

    @property
    def cells(self) -> list[Cell]:
        """All combinations of sizes of a resolved configuration."""
        sizes = (self.source_length or (None,), self.target_length or (None,), self.batch_size or (None,))
        return [Cell(batch, source, target) for source, target, batch in itertools.product(*sizes)]

    @property
    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of `tfexport.load`."""
        options = {name: getattr(self, name) for name in ("backend", "variant", "threads", "device", "engine")}
        return {**options, "trusted_keys": self.trusted_keys or None}

    def decoding(self, cell: Cell) -> DecodeConfig:
        """Return the decoding options of a cell."""
        lengths: dict[str, Any] = {"max_new_tokens": cell.target_length, "min_new_tokens": cell.target_length or 0}
        return DecodeConfig(num_beams=self.num_beams, return_scores=False, **lengths)


def resolve(config: BenchConfig, spec: ModelSpec | None, *, has_texts: bool) -> BenchConfig:
    """Fill in missing settings, within the limits of a model, if there is a local one."""
    batch_size = (config.slots,) if config.slots else _BATCH_SIZES[config.scenario]
    limits = {} if spec is None else {"source_length": spec.max_source_length, "target_length": spec.max_target_length}
    lengths = {"source_length": _SOURCE_LENGTH, "target_length": _TARGET_LENGTH}
    chosen = {name: min(lengths[name], limit) for name, limit in limits.items()}
    if spec is not None:
        chosen["source_length"] = spec.source.fits(chosen["source_length"])
    default = {name: () if has_texts else (length,) for name, length in chosen.items()}
    resolved = dataclasses.replace(
        config,
        batch_size=config.batch_size or (() if config.url else batch_size),
        slots=batch_size[0] if config.scenario == "server" and not config.url else None,
        source_length=config.source_length or default.get("source_length", ()),
        target_length=config.target_length or default.get("target_length", ()),
        duration=config.duration or _DURATION_S[config.scenario],
    )
    problems = [
        f"{name} is {length}, the limit of the bundle is {limit}; lower --{name.replace('_', '-')}"
        for name, limit in limits.items()
        for length in getattr(resolved, name)
        if length > limit
    ]
    problems += [
        f"source_length is {length}, but every source has {has} positions; leave it out"
        for length in config.source_length
        if spec is not None and (has := spec.source.fits(length)) != length
    ]
    if has_texts and config.source_length:
        problems.append("source_length is set, but the texts of --input have their own lengths; omit one of them")
    if len(resolved.cells) > MAX_CELLS:
        problems.append(f"the sweep has {len(resolved.cells)} combinations, the limit is {MAX_CELLS}; use fewer sizes")
    requests = (resolved.rate or 0) * (resolved.duration or 0)
    if requests > MAX_REQUESTS:
        problems.append(f"rate · duration is {requests:.0f} requests, the limit is {MAX_REQUESTS}; lower one of them")
    raise_all(ConfigError, "bench", problems)
    return resolved
