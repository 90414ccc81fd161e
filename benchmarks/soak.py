#!/usr/bin/env python
"""Soak a server for hours: mixed requests, reloads, clients that disconnect, and a watch on its memory.

Greedy texts, beams, seeded samples, streams and invalid requests are sent in
bursts to `tfexport serve`. Every answer must equal the first one. Resident memory,
threads and open files are sampled. The exit code is 1 if an answer differs, threads or files are left over, or
memory rises by more than 1 MB an hour over half an hour or more. Linux only.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from tfexport.bench.machine import environment
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BenchError, TfexportError

SCHEMA = "tfexport.soak/2"
NUM_TEXTS, BURST = 24, 12
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_new_tokens": 4},
    {"num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "seed": 1},
    {"repetition_penalty": 1.3},
    {"stop_strings": "-"},
)
INVALID: tuple[Any, ...] = ({}, [], {"text_input": ""}, {"text_input": "a", "parameters": {"num_beams": 0}})
MOST_MB_AN_HOUR, JUDGED_FROM_S = 1.0, 1800.0
_SERVE = "from tfexport.cli import main; main()"


@dataclass
class Soak:
    """The state of a soak; `first` has the first answer to each request, `samples` rows of at_s, MB, threads, files."""

    client: httpx.AsyncClient
    process: Process
    texts: list[str]
    model: str
    first: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def ask(self, rng: random.Random) -> None:
        """Send one request and check what comes."""
        way = rng.choices(("answer", "stream", "leave", "invalid"), (10, 4, 2, 2))[0]
        path = f"/v2/models/{self.model}/" + ("generate_stream" if way == "stream" else "generate")
        body = {"text_input": rng.choice(self.texts), "parameters": {} if way == "stream" else rng.choice(KINDS)}
        try:
            if way == "leave":
                await self.client.post(path, json=body, timeout=0.02 * rng.random() + 1e-4)
                self.counts["answered in time"] += 1
                return
            response = await self.client.post(path, json=rng.choice(INVALID) if way == "invalid" else body)
        except httpx.TimeoutException:
            self.counts["left"] += 1
            return
        except httpx.HTTPError as error:
            self.problems.append(f"{way}: {error!r}")
            return
        self.counts[way] += 1
        if way == "invalid":
            if not 400 <= response.status_code < 500:
                self.problems.append(f"invalid request: status {response.status_code}, expected 400 to 499")
            return
        key = json.dumps([way, body])
        text = response.text if way == "stream" else response.json().get("text_output")
        if response.status_code != 200 or self.first.setdefault(key, text) != text:
            self.problems.append(f"{key}: {response.status_code} {text}, expected {self.first.get(key)}")

    async def load(self, seconds: float, rate: float, reload_every_s: float) -> None:
        """Send bursts for some seconds, reload the bundle and sample the process."""
        rng, until, reload_at = random.Random(0), time.monotonic() + seconds, time.monotonic() + reload_every_s
        while time.monotonic() < until and self.process.returncode is None:
            size = rng.randint(1, BURST)
            await asyncio.gather(*(self.ask(rng) for _ in range(size)))
            if time.monotonic() > reload_at:
                self.process.send_signal(signal.SIGHUP)
                self.counts["reloads"] += 1
                reload_at += reload_every_s
            self.sample()
            await asyncio.sleep(rng.expovariate(rate / size))
        if self.process.returncode is not None:
            self.problems.append(f"the server ended with exit code {self.process.returncode}")

    def sample(self) -> tuple[float, float, int, int]:
        """Record what the process holds."""
        folder = Path(f"/proc/{self.process.pid}")
        values = dict(re.findall(r"^(\w+):\s+(\d+)", (folder / "status").read_text(), re.MULTILINE))
        files = len(list((folder / "fd").iterdir()))
        at_s = time.monotonic() - self.began
        self.samples.append((at_s, int(values["VmRSS"]) * 1024 / 1e6, int(values["Threads"]), files))
        return self.samples[-1]

    def slope(self) -> float | None:
        """Return the rise of memory in MB an hour, None if too little time has passed."""
        at_s, mb = np.array([row[:2] for row in self.samples]).T
        return float(np.polyfit(at_s / 3600, mb, 1)[0]) if at_s[-1] - at_s[0] >= JUDGED_FROM_S else None


async def start(bundle: Path, log: Path) -> tuple[Process, str]:
    """Start a server and return its process and address."""
    command = (sys.executable, "-P", "-c", _SERVE, "serve", str(bundle), "--port", "0", "--threads", "1")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=stderr)
    assert process.stdout is not None
    lines = []
    while (line := (await process.stdout.readline()).decode()) and not line.startswith("ready after"):
        lines.append(line)
    found = re.match(r"listening on (\S+),", "".join(lines))
    if not line or not found:
        raise BenchError(f"the server did not start: {log.read_text(encoding='utf-8')[-500:]}")
    return process, found[1]


async def soak(bundle: Path, warm_up_s: float, load_s: float, rate: float, reload_every_s: float) -> dict[str, Any]:
    """Soak a bundle and return the result as JSON values."""
    samples = open_bundle(bundle).manifest.text.samples
    if not samples:
        raise BenchError(f"{bundle}: has no recorded texts; give a bundle that has some")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        process, url = await start(bundle, Path(folder) / "log")
        try:
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
                texts = [sample.text for sample in samples[:NUM_TEXTS]]
                state = Soak(client, process, texts, bundle.resolve().name)
                await state.load(warm_up_s, rate, reload_every_s)
                await asyncio.sleep(1)
                before = state.sample()
                state.samples.clear()
                await state.load(load_s, rate, reload_every_s)
                await asyncio.sleep(1)
                after, slope = state.sample(), state.slope()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
    for name, old, new in (("threads", before[2], after[2]), ("open files", before[3], after[3])):
        if new > old + BURST:  # connections that are kept alive
            state.problems.append(f"{new} {name} at the end, {old} before")
    if slope is not None and slope > MOST_MB_AN_HOUR:
        state.problems.append(f"memory rises by {slope:.2f} MB an hour, expected at most {MOST_MB_AN_HOUR:g}")
    return {
        "schema": SCHEMA,
        "environment": environment(1),
        "counts": dict(state.counts),
        "mb": [before[1], after[1]],
        "mb_an_hour": slope,
        "problems": state.problems[:20],
        "samples": state.samples,
    }


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True)
@click.option("--warm-up", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="MINUTES")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True, help="A second.")
@click.option("--reload-every", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              metavar="SECONDS")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/soak/soak.json"), show_default=True)
def main(bundle: Path, minutes: float, warm_up: float, rate: float, reload_every: float, output: Path) -> None:
    try:
        found = asyncio.run(soak(bundle, 60 * warm_up, 60 * minutes, rate, reload_every))
    except TfexportError as error:
        raise click.ClickException(str(error)) from error
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found) + "\n", encoding="utf-8")
    click.echo(f"{found['counts']}; memory {found['mb'][0]:.1f} to {found['mb'][1]:.1f} MB; {output}")
    if found["problems"]:
        raise click.ClickException("; ".join(found["problems"]))


if __name__ == "__main__":
    main()
