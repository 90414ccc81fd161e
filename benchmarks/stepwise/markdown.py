"""A result as Markdown: who is measured on what, a table for each model and precision, and who took no part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from stepwise.cells import SOURCE_LENGTH, TARGET_LENGTH

Record = Mapping[str, Any]

_HEAD = (
    "| batch | contender | ms a step | range | times {reference} | {busy} ms | rest ms | given a step | CPU ms | "
    "bandwidth | equal tokens |"
)


def render(result: Record) -> str:
    """Write a result as Markdown.

    Args:
        result: document of `stepwise.result.Result`.
    """
    groups = groupby(result["cells"], key=lambda cell: (cell["cell"]["model"], cell["cell"]["precision"]))
    tables = [_table(model, precision, list(cells), result) for (model, precision), cells in groups]
    return "\n\n".join(filter(None, [_about(result), *tables, _failures(result), _legend(result)]))


def _about(result: Record) -> str:
    about, gpu, options = result["environment"], result["gpu"], result["options"]
    device = f"{gpu['name']}, driver {gpu['driver_version']}, " if gpu else ""
    dry = "**A dry run on the CPU: it shows that everything works and says nothing of a GPU.** "
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{'' if options['device'] == 'cuda' else dry}{device}{about['cpu']}, {about['threads']} cores, "
        f"{about['system']}, {about['date'][:10]}; {versions}; revision {result['revision'][:12] or 'unknown'}"
        f"{'+' * result['revision'].endswith('+')}; {options['rounds']} rounds, {TARGET_LENGTH} tokens from sources of "
        f"{SOURCE_LENGTH}, or what the model takes."
    )


def _table(model: str, precision: str, cells: Iterable[Record], result: Record) -> str:
    cells = list(cells)
    references = {cell["reference"] for cell in cells if cell["reference"]}
    busy = "device" if result["options"]["device"] == "cuda" else "operators"
    head = _HEAD.format(reference=" or ".join(sorted(references)) or "nobody", busy=busy)
    # A GPU is as quick in a trace as without, the host is not.
    whole = "step_ms" if busy == "device" else "traced_ms"
    rows = [_row(cell, run, whole) for cell in cells for run in cell["runs"]]
    if not rows:
        return ""
    return "\n".join([f"## {model} {precision}", "", head, "|---" * head.count(" | ") + "|---|", *rows])


def _row(cell: Record, run: Record, whole: str) -> str:
    of = next((one["step_ms"] for one in cell["runs"] if one["contender"] == cell["reference"]), None)
    busy = run["busy_ms"]
    fields = (
        str(cell["cell"]["batch"]),
        run["contender"],
        f"{run['step_ms']:.3f}",
        f"{run['low_ms']:.3f} to {run['high_ms']:.3f}",
        f"{run['step_ms'] / of:.2f}" if of else "",
        "" if busy is None else f"{busy:.3f}",
        "" if busy is None else f"{max(0.0, run[whole] - busy):.3f}",
        "" if run["given"] is None else f"{run['given']:.0f}",
        f"{run['cpu_ms']:.3f}",
        f"{run['bandwidth_share']:.0%}",
        f"{run['equal_prefix']:.0%}",
    )
    return f"| {' | '.join(fields)} |"


def _failures(result: Record) -> str:
    """List who took no part, with the reason, which stands once for the cells that it concerns."""
    found: dict[tuple[str, str], list[str]] = {}
    for measured in result["cells"]:
        cell = measured["cell"]
        for name, reason in measured["failures"].items():
            found.setdefault((name, reason), []).append(f"{cell['model']} {cell['precision']} {cell['batch']}")
    if not found:
        return ""
    rows = [f"| {name} | {', '.join(cells)} | {reason.replace('|', '/')} |" for (name, reason), cells in found.items()]
    return "\n".join(["## Not measured", "", "| contender | cells | reason |", "|---|---|---|", *rows])


def _legend(result: Record) -> str:
    shares = sorted({run["bandwidth"] for cell in result["cells"] for run in cell["runs"]})
    spread = f" ({shares[0] / 1e9:,.0f} to {shares[-1] / 1e9:,.0f} GB/s)" if shares else ""
    device = result["options"]["device"] == "cuda"
    way = "by a copy of 1 GiB on the device" if device else "by reading as much memory as a step"
    busy = (
        "*device* is the time of a step in which the GPU works, from a trace; *rest* what is left, in which it waits "
        "for the host; *given* the kernels, copies and fills"
        if device
        else "*operators* is the time in PyTorch's operators, from a trace, which sees nothing else; *rest* what is "
        "left of the step, which a trace slows down; *given* the operators"
    )
    return (
        f"*ms a step* is the median over rounds; {busy}. *CPU* is the time of all cores of the process. *bandwidth* is "
        f"the share of what was measured in the same process{spread}, {way}, that weights and caches of a step need. "
        "*equal tokens* are those before the first that differs from the contender that times are compared with; "
        "random weights leave few long texts whole in 16 bits."
    )
