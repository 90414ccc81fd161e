"""What is compared: systems, in which precisions and with how many threads, at which sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

OURS, REVISION = "tfexport", "revision"
PRECISIONS = ("fp32", "int8", "int4")
# Presets, and the trained model that comes with the project.
PRESETS, DATES = ("tiny", "paper-base", "paper-big"), "dates"
MODELS = (*PRESETS, DATES)
# Tokens decoded for each source; a date has no more.
TARGET_LENGTH, DATE_LENGTH = 64, 16
# Ids below are special in every preset.
FIRST_TOKEN = 4
# Rough, and only for the estimate of the time that is left: of a call, relative to the smallest.
_COST = {"tiny": 0.2, "dates": 0.1, "paper-base": 10.0, "paper-big": 33.0}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes at which systems are compared.

    Attributes:
        model: name of the weights.
        is_quantised: compare int8 and int4 instead of fp32.
        source_length: tokens of each source.
        batch_size: sources of one call.
        num_beams: 1 is greedy.
        target_length: tokens decoded for each source, neither more nor less.
    """

    model: str
    is_quantised: bool
    source_length: int
    batch_size: int
    num_beams: int
    target_length: int = TARGET_LENGTH

    @property
    def tokens(self) -> int:
        """Tokens that one call returns."""
        return self.batch_size * self.target_length

    @property
    def cost(self) -> float:
        """What a call costs, relative to others and roughly."""
        kind = 0.6 if self.is_quantised else 1.0
        work = math.pow(self.batch_size, 0.6) * math.sqrt(self.num_beams) * (0.8 + self.source_length / 160)
        return 0.1 + kind * _COST.get(self.model, 1.0) * work / 10

    def sources(self, vocab: int) -> list[list[int]]:
        """Draw the token ids of the sources, the same on every call and machine."""
        draw = random.Random(0)
        return [[draw.randrange(FIRST_TOKEN, vocab) for _ in range(self.source_length)] for _ in range(self.batch_size)]

    def __str__(self) -> str:
        """Name the setting in one line."""
        kind = "int8 and int4" if self.is_quantised else "fp32"
        decoding = "greedy" if self.num_beams == 1 else f"beam {self.num_beams}"
        return f"{self.model} {kind}, source {self.source_length}, batch {self.batch_size}, {decoding}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def matrix(
    models: Sequence[str],
    kinds: Sequence[bool],
    source_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    num_beams: Sequence[int],
) -> list[Setting]:
    """Return every combination; those of one model and kind stand together, since they share loaded systems."""
    return [
        Setting(
            model=model,
            is_quantised=kind,
            source_length=source,
            batch_size=batch,
            num_beams=beams,
            target_length=DATE_LENGTH if model == DATES else TARGET_LENGTH,
        )
        for model, kind, source, batch, beams in product(models, kinds, source_lengths, batch_sizes, num_beams)
    ]


@dataclass(frozen=True, kw_only=True)
class System:
    """A system as the comparison knows it.

    Attributes:
        module: its worker.
        environment: name of the virtual environment that it needs.
        files: name of the folder that `convert` makes for it.
        precisions: that it has.
        is_ours: is tfexport, this or another revision: loads a bundle that its own command line exports.
        is_slow: takes part in three rounds, started once, and at the shortest source alone.
    """

    module: str
    environment: str
    files: str
    precisions: tuple[str, ...] = ("fp32",)
    is_ours: bool = False
    is_slow: bool = False


SYSTEMS = {
    OURS: System(
        module="comparison.workers.ours", environment=OURS, files="bundle", precisions=PRECISIONS, is_ours=True
    ),
    # Another tfexport, where --python says.
    REVISION: System(
        module="comparison.workers.ours",
        environment=REVISION,
        files="revision",
        precisions=("fp32", "int8"),
        is_ours=True,
    ),
    "ctranslate2": System(
        module="comparison.workers.translator",
        environment="ctranslate2",
        files="ctranslate2",
        precisions=("fp32", "int8"),
    ),
    "transformers": System(
        module="comparison.workers.marian", environment="transformers", files="marian", is_slow=True
    ),
    "torch.compile": System(
        module="comparison.workers.compiled", environment="transformers", files="marian", is_slow=True
    ),
    "optimum-onnx": System(
        module="comparison.workers.optimum", environment="optimum-onnx", files="optimum-onnx", is_slow=True
    ),
}
PEERS = tuple(name for name in SYSTEMS if name != OURS)
FOREIGN = tuple(name for name in PEERS if name != REVISION)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A system in one precision with one number of threads.

    Attributes:
        system: key of `SYSTEMS`.
        precision: one of `PRECISIONS`.
        threads: None is the system's own choice.
        optimize_for: "latency" or "throughput", of quantised bundles.
    """

    system: str
    precision: str = "fp32"
    threads: int | None = None
    optimize_for: str | None = None

    @property
    def files(self) -> str:
        """Name of the folder that holds its weights."""
        return "-".join(filter(None, (SYSTEMS[self.system].files, self.precision, self.optimize_for)))

    def __str__(self) -> str:
        """Name it in one line."""
        threads = counted(self.threads) if self.threads else ""
        return ", ".join(filter(None, (f"{self.system} {self.precision}", self.optimize_for, threads)))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def counted(threads: int) -> str:
    """Spell a number of threads."""
    return f"{threads} thread{'s' if threads != 1 else ''}"


REFERENCE = Variant(system=OURS)


def taking_part(
    setting: Setting, *, peers: Sequence[str], precisions: Sequence[str], shortest_source: int, cores: int
) -> list[Variant]:
    """List who takes part in a setting, in the order of a round, ours first.

    Args:
        setting: what is measured.
        peers: names of systems beside ours.
        precisions: of those that are measured at all.
        shortest_source: of all settings; the slow peers take part there alone.
        cores: that a process may use.
    """
    wanted = [precision for precision in precisions if (precision != "fp32") == setting.is_quantised]
    found = [_variant(OURS, precision, None, setting) for precision in wanted]
    for peer in peers:
        system = SYSTEMS[peer]
        # Peers without int4 meet ours in int8, whether ours runs in it or not.
        needed = {"int8"} if setting.is_quantised and wanted else set(wanted)
        if needed & set(system.precisions) and not (system.is_slow and setting.source_length > shortest_source):
            found += [
                _variant(peer, precision, threads, setting)
                for precision in sorted(needed)
                for threads in thread_settings(peer, cores)
            ]
    return found


def _variant(system: str, precision: str, threads: int | None, setting: Setting) -> Variant:
    """Choose what a bundle is made for as its documentation does; only int8 has a form for throughput."""
    aim = None
    if SYSTEMS[system].is_ours and precision != "fp32":
        aim = "throughput" if precision == "int8" and setting.batch_size > 1 else "latency"
    return Variant(system=system, precision=precision, threads=threads, optimize_for=aim)


def thread_settings(peer: str, cores: int) -> list[int | None]:
    """Return the numbers of threads that a peer is tried with: CTranslate2 is often faster with one."""
    if peer == "ctranslate2":
        return [*sorted({1, cores})]
    return [cores if SYSTEMS[peer].environment == "transformers" else None]
