"""Many inputs of each kind, in a process of its own whose memory is limited.

python -m tests.fuzz.child ORIGINALS WORK COUNT SEED KIND...

WORK/KIND/report.json has how many were refused, the same or another, and what failed. WORK/KIND/current is the input
that is being used: what killed the process where it dies, and WORK/KIND/error says how.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException, StopTest

from tests.fuzz.kind import judge
from tests.fuzz.kinds import KINDS

# What an input may take beyond what the process had before the first, the CPU time that it may take, and the time after
# which it hangs, which a busy machine does not reach.
MOST_MORE_BYTES, MOST_CPU_S, HANGS_AFTER_S = 10**9, 30, 600
# Hypothesis may end before it has drawn so many different ones.
_ROUNDS = 20


def status_bytes(name: str) -> int:
    """Return a line of /proc/self/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def run(originals: Path, name: str, count: int, first_seed: int, work: Path) -> dict[str, Any]:
    """Use inputs; return the report."""
    (work / "scratch").mkdir()
    kind = KINDS[name](originals, work / "scratch")
    faulthandler.register(signal.SIGPROF, chain=True)  # which ends the process
    limit = status_bytes("VmSize") + MOST_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts: Counter[str] = Counter()
    failures: dict[str, dict[str, str]] = {}
    slowest = 0.0

    def use(raw: bytes) -> None:
        nonlocal slowest
        if counts.total() >= count:
            return
        (work / "current").write_bytes(raw)
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        start = time.monotonic()
        try:
            counts[judge(kind, raw)] += 1
        except (HypothesisException, StopTest, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of a library is no Exception
            counts["failed"] += 1
            told = traceback.format_exception(error)
            key = f"{type(error).__name__} {''.join(told[-2:])[:2000]}"
            failures.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "N", key)[:300], {
                "trace": "".join(told)[-4000:], "example": base64.b64encode(raw).decode(),
            })  # fmt: skip
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
        slowest = max(slowest, time.monotonic() - start)

    for number in range(_ROUNDS):
        if counts.total() < count:
            drawn = given(kind.examples)(use)
            checked = settings(
                max_examples=count,
                phases=[Phase.generate],
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            seed(first_seed + number)(checked(drawn))()
    kind.close()
    return {
        "kind": name,
        "counts": dict(counts),
        "slowest_s": slowest,
        "peak_mb": status_bytes("VmHWM") / 1e6,
        "failures": list(failures.values()),
    }


def main(originals: Path, work: Path, count: int, first_seed: int, names: list[str]) -> None:
    """Run each kind in a fork: what all import is imported once, and what kills one kills no other."""
    for name in names:
        folder = work / name
        folder.mkdir()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            (folder / "exit").write_text(str(os.waitstatus_to_exitcode(status)))
            continue
        with (folder / "error").open("w") as error:
            os.dup2(error.fileno(), 2)
        (folder / "report.json").write_text(json.dumps(run(originals, name, count, first_seed, folder)))
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
