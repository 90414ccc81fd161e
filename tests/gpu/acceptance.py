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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from tests.conftest import ROOT
from tests.gpu.job import Entry, Numbers, entry, read_checks, read_lines, write_lines
from tests.gpu.parts import FOUND, PARTS, WORK, Part, skipped
from tfexport._io.atomic import whole_file
from tfexport.doctor import Diagnosis, diagnose

# Warnings of libraries on the machine are no failures.
WORKER = (sys.executable, "-m", "pytest", "-q", "-s", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default")
# With CUPTI of a former profile attached, replays of graphs are slower, or fail.
SETTINGS = {"TEARDOWN_CUPTI": "0"}
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
    status: str  # "passed", "failed", "refused" (by the library), "skipped", or "unfinished": the next run goes on
    reason: str = ""  # why it was skipped, is unfinished, or failed as a whole
    seconds: float = 0.0  # of all runs
    checks: list[Entry] = field(default_factory=list)
    tail: str = ""  # last lines of the output of a part that failed
    is_complete: bool = False  # all checks have ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write report.json and report.md after each; return 1 when one failed."""
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU, and write a report.")
    parser.add_argument("--output", type=Path, required=True, help="folder for results; the next run goes on with them")
    parser.add_argument("--budget", type=float, default=540, help="seconds of this run; the next one does the rest")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run, also if failed")
    parser.add_argument("--work", type=Path, help="folder for bundles and engines, kept for the next run")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    say("looking at the machine")
    diagnosis = diagnose()
    outcomes = read_outcomes(options.output)
    with tempfile.TemporaryDirectory(prefix="acceptance-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        for outcome in run_parts(options.output.resolve(), work, began + options.budget, outcomes, options.only):
            outcomes[outcome.part] = outcome
            write(options.output, diagnosis, outcomes)
    counts = Counter(outcome.status for outcome in outcomes.values())
    say(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {options.output / 'report.md'}")
    return int(counts["failed"] > 0)


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """Read the outcomes of an earlier run by part."""
    path = folder / "report.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else []
    return {part["part"]: Outcome(**part) for part in parts}


def run_parts(
    output: Path, work: Path, deadline: float, former: Mapping[str, Outcome], only: Sequence[str] | None = None
) -> Iterator[Outcome]:
    """Run every part that can run here and is not complete, until the time is over."""
    for part in PARTS:
        known = former.get(part.name)
        if part.name not in only if only else known and known.is_complete:
            continue
        left = deadline - time.monotonic()
        if left < LEAST_S:
            outcome = known or Outcome(part.name, part.what, "skipped", OUT_OF_TIME)
        elif reason := skipped(part):
            outcome = Outcome(part.name, part.what, "skipped", reason)
        else:
            found = result_file(output, part)
            if only:
                write_lines(found, [line for line in read_lines(found) if line["status"] in ("passed", "refused")])
            outcome = run_part(part, output, work, left)
            outcome.seconds += known.seconds if known else 0
        say(f"{part.name}: {outcome.status}{': ' + outcome.reason if outcome.reason else ''} ({outcome.seconds:.0f} s)")
        yield outcome


def result_file(output: Path, part: Part) -> Path:
    """Return the file for the checks of a part, see `gpu.job.Job`."""
    folder = output / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{part.name}.jsonl"


def run_part(part: Part, output: Path, work: Path, left_s: float, worker: Sequence[str] = WORKER) -> Outcome:
    """Run one part in its own process, for at most `left_s` seconds."""
    found = result_file(output, part)
    printed, known = found.with_suffix(".log"), num_ended(found)
    work.mkdir(parents=True, exist_ok=True)
    limit_s, began = min(part.limit_s, left_s), time.monotonic()
    with printed.open("wb") as log:
        code = run_process([*worker, f"tests/gpu/{part.test}"], {WORK: str(work), FOUND: str(found)}, log, limit_s)
    problem = ""
    if code is None and limit_s == part.limit_s and num_ended(found) == known:
        problem = f"no check ended within {limit_s:.0f} s"
    elif code and not (code == TESTS_FAILED and "failed" in statuses(found)):  # else the checks have the reason
        problem = f"crashed with signal {-code}" if code < 0 else f"exit code {code}"
    elif code is not None and not read_checks(found):
        problem = "nothing was checked"
    if problem:  # so that the next run goes on after the check that was running
        unfinished = [check["name"] for check in read_checks(found) if check["status"] == "unfinished"]
        write_lines(found, [entry(name, "failed", problem) for name in unfinished], "a")
    status = "failed" if problem else judge(statuses(found), is_stopped=code is None)
    reason = problem or (f"stopped after {limit_s:.0f} s" if code is None else "")
    tail = "\n".join(printed.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if status == "failed" else ""
    seconds, is_complete = time.monotonic() - began, code in (0, TESTS_FAILED)
    return Outcome(part.name, part.what, status, reason, seconds, read_checks(found), tail, is_complete)


def run_process(command: Sequence[str], settings: Mapping[str, str], log: IO[bytes], limit_s: float) -> int | None:
    """Return the exit code of a process, or None if it was killed at the limit."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **SETTINGS, **settings},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
        process.wait()
        return None


def num_ended(found: Path) -> int:
    return sum(status != "unfinished" for status in statuses(found))


def statuses(found: Path) -> list[str]:
    return [check["status"] for check in read_checks(found)]


def judge(found: Sequence[str], *, is_stopped: bool) -> str:
    """Return the status of a part by those of its checks; running out of time is no failure."""
    if "failed" in found:
        return "failed"
    return "unfinished" if is_stopped else "refused" if "refused" in found else "passed"


def write(folder: Path, diagnosis: Diagnosis, outcomes: Mapping[str, Outcome]) -> None:
    """Write both reports; a process that dies leaves the former ones."""
    found = [outcomes[part.name] for part in PARTS if part.name in outcomes]
    report = {
        "passed": all(outcome.status != "failed" for outcome in found),
        "machine": diagnosis.to_dict(),
        "parts": [asdict(outcome) for outcome in found],
    }
    text = json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("report.json", text), ("report.md", "\n".join(markdown(diagnosis, found)))):
        with whole_file(folder / name) as draft:
            draft.write_text(content + "\n", encoding="utf-8")


def markdown(diagnosis: Diagnosis, outcomes: Sequence[Outcome]) -> list[str]:
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
        f"- {sum(outcome.seconds for outcome in outcomes):.0f} s",
        "",
        *table(
            ["part", "what", "result", "seconds", "why"],
            [[o.part, o.what, o.status, f"{o.seconds:.0f}", o.reason] for o in outcomes],
        ),
    ]
    lines += step_lines([check["numbers"] for outcome in outcomes for check in outcome.checks])
    for outcome in outcomes:
        if outcome.checks:
            rows = [[c["name"], c["status"], f"{c['seconds']:.1f}", spell(c)] for c in outcome.checks]
            lines += ["", f"## {outcome.part}", "", *table(["check", "result", "seconds", "found"], rows)]
        if outcome.tail:
            lines += ["", f"The end of the output of {outcome.part}:", "", "```", outcome.tail, "```"]
    return lines


def step_lines(found: Sequence[Numbers]) -> list[str]:
    """Return tables of all measured steps: one row per backend, one column per setting."""
    bandwidth = max((numbers.get("bandwidth_gb_s", 0) for numbers in found), default=0)
    lines = grid("Milliseconds a step", found, lambda numbers: f"{numbers['step_ms']:.3f}")
    if lines:
        lines += ["", "A decode with its encoder, divided by its steps. The eager and compiled models wait for the GPU"]
        lines[-1] += " several times in a step, to upload tokens and to compare candidates."
    if bandwidth:
        title = f"Percent of the measured {bandwidth:.0f} GB/s"  # that the bytes that a step must read are
        lines += grid(title, found, lambda n: f"{100 * n['step_bytes'] / (n['step_ms'] * 1e6) / bandwidth:.0f}")
    return lines + grid("Kernels, copies and fills a step", found, lambda numbers: f"{numbers['launches']:.0f}")


def grid(title: str, found: Sequence[Numbers], spell: Callable[[Numbers], str]) -> list[str]:
    """Return a table of the numbers that have the keys that `spell` reads."""
    rows: dict[str, dict[str, str]] = {}
    for numbers in found:
        with suppress(KeyError):
            rows.setdefault(numbers["backend"], {})[numbers["setting"]] = spell(numbers)
    settings = list(dict.fromkeys(setting for row in rows.values() for setting in row))
    cells = [[backend, *(row.get(setting, "") for setting in settings)] for backend, row in rows.items()]
    return ["", f"## {title}", "", *table(["backend", *settings], cells)] if rows else []


def spell(check: Entry) -> str:
    """Return the detail and numbers of a check in one cell."""
    return "; ".join([*filter(None, [check["detail"]]), *(f"{k} {v}" for k, v in check["numbers"].items())])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(" ".join(str(c).replace("|", "\\|").split()) for c in row) + " |" for row in cells]


def say(line: str) -> None:
    print(line, flush=True)
