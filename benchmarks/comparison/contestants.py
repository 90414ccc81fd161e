"""Who takes part: each system with its precisions and thread settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comparison.settings import Setting

OURS = "tfexport"
PRECISIONS = ("fp32", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class System:
    """A system as the comparison knows it.

    Attributes:
        module: its worker.
        environment: name of the virtual environment that it needs.
        files: name of the folder that `convert` makes for it.
        precisions: that it has.
        is_slow: takes part in three rounds, started once, and at the shortest source alone.
    """

    module: str
    environment: str
    files: str
    precisions: tuple[str, ...] = ("fp32",)
    is_slow: bool = False


SYSTEMS = {
    OURS: System(module="comparison.workers.ours", environment=OURS, files="bundle", precisions=PRECISIONS),
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


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A system in one precision with one number of threads.

    Attributes:
        system: key of `SYSTEMS`.
        precision: one of `PRECISIONS`.
        threads: None is the system's own choice.
        optimize_for: "latency" or "throughput", of our quantised bundles.
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


REFERENCE = Contestant(system=OURS)


def contestants(
    setting: Setting, *, peers: Sequence[str], precisions: Sequence[str], shortest_source: int, cores: int
) -> list[Contestant]:
    """List who takes part in a setting, in the order of their turns, ours first.

    Args:
        setting: what is measured.
        peers: names of systems beside ours.
        precisions: of those that are measured at all.
        shortest_source: of all settings; the slow peers take part there alone.
        cores: that a process may use.
    """
    wanted = [precision for precision in precisions if (precision != "fp32") == setting.is_quantised]
    found = [
        Contestant(system=OURS, precision=precision, optimize_for=_aim(precision, setting)) for precision in wanted
    ]
    for peer in peers:
        system = SYSTEMS[peer]
        # Peers without int4 meet ours in int8, whether ours runs in it or not.
        needed = {"int8"} if setting.is_quantised and wanted else set(wanted)
        if needed & set(system.precisions) and not (system.is_slow and setting.source_length > shortest_source):
            found += [
                Contestant(system=peer, precision=precision, threads=threads)
                for precision in sorted(needed)
                for threads in thread_settings(peer, cores)
            ]
    return found


def _aim(precision: str, setting: Setting) -> str | None:
    """Choose what a bundle is made for as its documentation does; only int8 has a form for throughput."""
    if precision == "fp32":
        return None
    return "throughput" if precision == "int8" and setting.batch_size > 1 else "latency"


def thread_settings(peer: str, cores: int) -> list[int | None]:
    """Return the numbers of threads that a peer is tried with: CTranslate2 is often faster with one."""
    if peer == "ctranslate2":
        return [*sorted({1, cores})]
    return [cores if SYSTEMS[peer].environment == "transformers" else None]
