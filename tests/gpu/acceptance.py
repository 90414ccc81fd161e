"""Run the parts of the acceptance, each in its own process, within a budget, and write a report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.gpu.parts import FOUND, PARTS, WORK, Part, skipped
from tfexport.doctor import Diagnosis, diagnose

WORKER = (sys.executable, "-m", "pytest", "-q", "-s", "-m", "gpu", "-p", "no:cacheprovider")
# Libraries alone take seconds to load.
LEAST_S = 15
TAIL_LINES = 20
OUT_OF_TIME = "out of time"
TESTS_FAILED = 1


@dataclass
class Outcome:
    """The result of a part."""

    part: str
    what: str
    status: str  # "passed", "failed", "refused" (by the library) or "skipped"
    reason: str = ""  # why it was skipped or failed as a whole
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)  # see `gpu.job.Job`
    tail: str = ""  # last lines of the output of a part that failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write report.json and report.md; return 1 when one failed."""
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU, and write a report.")
    parser.add_argument("--output", type=Path, required=True, help="folder for report.json and report.md")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all; what no longer fits is skipped")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run")
    parser.add_argument("--work", type=Path, help="folder for bundles and engines, kept for the next run")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    say("looking at the machine")
    diagnosis = diagnose()
    with tempfile.TemporaryDirectory(prefix="acceptance-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        outcomes = run_parts(work, began + options.budget, options.only)
    write(options.output, diagnosis, outcomes, time.monotonic() - began)
    counts = [f"{sum(o.status == status for o in outcomes)} {status}" for status in dict.fromkeys(statuses(outcomes))]
    say(f"{', '.join(counts)}; {options.output / 'report.md'}")
    return int("failed" in statuses(outcomes))


def run_parts(work: Path, deadline: float, only: Sequence[str] | None = None) -> list[Outcome]:
    """Run every part that can run here, until the time is over."""
    outcomes = []
    for part in PARTS:
        if only and part.name not in only:
            continue
        left = deadline - time.monotonic()
        if left < LEAST_S:
            outcome = Outcome(part.name, part.what, "skipped", OUT_OF_TIME)
        elif reason := skipped(part):
            outcome = Outcome(part.name, part.what, "skipped", reason)
        else:
            outcome = run_part(part, work, left)
        outcomes.append(outcome)
        say(f"{part.name}: {outcome.status}{': ' + outcome.reason if outcome.reason else ''} ({outcome.seconds:.0f} s)")
    return outcomes


def run_part(part: Part, work: Path, left_s: float, worker: Sequence[str] = WORKER) -> Outcome:
    """Run one part in its own process, for at most `left_s` seconds."""
    folder = work / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    found, printed = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    found.unlink(missing_ok=True)
    limit_s, began = min(part.limit_s, left_s), time.monotonic()
    with printed.open("wb") as log:
        process = subprocess.Popen(
            [*worker, f"tests/gpu/{part.test}"],
            cwd=ROOT,
            env={**os.environ, WORK: str(work), FOUND: str(found)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = 0
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
            process.wait()
            death = f"no end within {limit_s:.0f} s" if limit_s == part.limit_s else OUT_OF_TIME
        else:
            death = f"crashed with signal {-code}" if code < 0 else f"exit code {code}" if code else ""
    checks = read_checks(found)
    status = judge(checks, death)
    if code == TESTS_FAILED and any(check["status"] == "failed" for check in checks):
        death = ""  # the checks have the reason
    reason = death or ("" if checks else "nothing was checked")
    tail = "\n".join(printed.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if status == "failed" else ""
    return Outcome(part.name, part.what, status, reason, time.monotonic() - began, checks, tail)


def read_checks(path: Path) -> list[dict[str, Any]]:
    """Read the checks that a part wrote; the last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def judge(checks: Sequence[dict[str, Any]], death: str) -> str:
    """Return the status of a part; running out of time is no failure."""
    found = {check["status"] for check in checks}
    if "failed" in found or (death and death != OUT_OF_TIME):
        return "failed"
    if death:
        return "skipped"
    return "refused" if "refused" in found else "passed" if found else "failed"


def statuses(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def write(folder: Path, diagnosis: Diagnosis, outcomes: Sequence[Outcome], seconds: float) -> None:
    report = {
        "passed": "failed" not in statuses(outcomes),
        "seconds": round(seconds, 1),
        "machine": diagnosis.to_dict(),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    text = json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    lines = markdown(diagnosis, outcomes, seconds)
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def markdown(diagnosis: Diagnosis, outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    gpus = [
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_bytes'] / 2**30:.0f} GiB, driver for CUDA {gpu['driver_version']}"
        for gpu in diagnosis.gpus
    ]
    libraries = {library.name: library.version for library in diagnosis.libraries if library.version}
    lines = [
        "# Acceptance on a GPU",
        "",
        f"- {'; '.join(gpus) or 'no GPU'}",
        f"- {diagnosis.system}, Python {diagnosis.python}, tfexport {diagnosis.tfexport}",
        f"- {', '.join(f'{name} {version}' for name, version in libraries.items())}",
        f"- {seconds:.0f} s",
        "",
        *table(
            ["part", "what", "result", "seconds", "why"],
            [[o.part, o.what, o.status, f"{o.seconds:.0f}", o.reason] for o in outcomes],
        ),
    ]
    lines += step_lines(outcomes)
    for outcome in outcomes:
        if outcome.checks:
            rows = [[c["name"], c["status"], f"{c['seconds']:.1f}", spell(c)] for c in outcome.checks]
            lines += ["", f"## {outcome.part}", "", *table(["check", "result", "seconds", "found"], rows)]
        if outcome.tail:
            lines += ["", f"The end of the output of {outcome.part}:", "", "```", outcome.tail, "```"]
    return lines


def step_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return tables of all measured steps: one row per backend, one column per setting."""
    checks = [check for outcome in outcomes for check in outcome.checks]
    bandwidth = max((check["numbers"].get("bandwidth_gb_s", 0) for check in checks), default=0)
    measured = {check["name"]: check["numbers"] for check in checks if "step_ms" in check["numbers"]}
    lines = grid("Milliseconds a step", {name: found["step_ms"] for name, found in measured.items()}, "{:.3f}")
    if bandwidth:
        shares = {name: shares_of(found, bandwidth) for name, found in measured.items()}
        lines += grid(f"Percent of the measured {bandwidth:.0f} GB/s", shares, "{:.0f}")
    seen = {name: found["launches"] for name, found in measured.items() if found.get("launches")}
    return lines + grid("Kernels, copies and fills a step", seen, "{:.0f}")


def shares_of(numbers: dict[str, Any], bandwidth: float) -> dict[str, float]:
    """Return by setting how many percent of the bandwidth are the bytes that a step must read."""
    read = numbers["step_bytes"]
    return {setting: 100 * read[setting] / (ms * 1e6) / bandwidth for setting, ms in numbers["step_ms"].items()}


def grid(title: str, rows: dict[str, dict[str, float]], variant: str) -> list[str]:
    if not rows:
        return []
    settings = list(dict.fromkeys(setting for row in rows.values() for setting in row))
    found = [[name, *(variant.format(row[s]) if s in row else "" for s in settings)] for name, row in rows.items()]
    return ["", f"## {title}", "", *table(["backend", *settings], found)]


def spell(check: dict[str, Any]) -> str:
    """Return the numbers of a check in one cell; numbers by setting have their own tables."""
    numbers = {name: value for name, value in check["numbers"].items() if not isinstance(value, dict)}
    return "; ".join([*([check["detail"]] if check["detail"] else []), *(f"{k} {v}" for k, v in numbers.items())])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(" ".join(str(c).replace("|", "\\|").split()) for c in row) + " |" for row in cells]


def say(line: str) -> None:
    print(line, flush=True)
