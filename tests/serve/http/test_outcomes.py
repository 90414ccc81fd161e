"""Many requests of every kind at once: every one is counted, once, as what became of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.serve.http.served import Exchange, Serve, Served
from tests.serve.http.test_generate import KINDS
from tfexport.model.model import Model

AT_ONCE, NUMBER = 80, 1000
SENT = (
    *("ok", "ok", "stream", "stream", "invalid", "malformed", "deadline", "leaves", "leaves_stream", "half"),
    *("align", "align_nothing"),
)
STATUS = {200: "ok", 400: "invalid", 413: "invalid", 429: "queue_full", 499: "cancelled", 504: "deadline"}


def request(kind: str, text: str, number: int) -> Exchange:
    options = dict(KINDS[number % len(KINDS)]) if kind in ("ok", "leaves") else {}
    if kind == "invalid":
        options = {"temperature": number}
    if kind == "deadline":
        options = {"timeout_ms": 0.01 + number % 5}
    content = json.dumps({"text_input": text, "parameters": options}).encode()
    if kind == "malformed":
        content = content[:-1] if number % 2 else b" " * 2_000_000
    path = "generate_stream" if "stream" in kind else "generate"
    if "align" in kind:
        path = "align"
        content = json.dumps({"text_input": text} | ({"target_text": "2026-03-03"} if kind == "align" else {})).encode()
    return Exchange(f"/v2/models/dates/{path}", content)


def became(one: Exchange) -> str:
    """Say what a client has seen; a stream may end badly though its status is 200."""
    if one.status == 200 and b"event: error" in one.body:
        return "cancelled" if b"cancelled" in one.body else "deadline"
    return STATUS[one.status]


async def test_outcomes_sum_to_the_requests(serve: Serve, dates_aligned: Path, model: Model, texts: list[str]) -> None:
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    expected = {text: model.generate([text])[0].text for text in texts}
    async with serve(bundle=dates_aligned, max_waiting=32, timeout=300) as served:

        async def ask(index: int) -> None:
            kind, text = SENT[rng.integers(len(SENT))], texts[rng.integers(len(texts))]
            one = request(kind, text, index)
            if kind == "half":
                one.leave_half_said()
            if kind.startswith("leaves"):
                asyncio.get_running_loop().call_later(rng.random() * 0.02, one.leave)
            await one.run(served.app)
            seen[became(one)] += 1
            if kind == "stream" and became(one) == "ok":
                pieces = [json.loads(line[6:]) for line in one.body.decode().split("\n\n")[:-1]]
                assert "".join(piece["text_output"] for piece in pieces) == expected[text]

        waiting = iter(range(NUMBER))

        async def client() -> None:
            for index in waiting:
                await ask(index)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        check(served, seen)


def check(served: Served, seen: Counter[str]) -> None:
    counted: Counter[str] = Counter()
    gauges: dict[str, Any] = {}
    for family in served.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "tfexport_requests_total":
                counted[sample.labels["outcome"]] += int(sample.value)
            if family.type == "gauge":
                gauges[sample.name] = sample.value
    assert counted.total() == NUMBER
    assert +counted == seen
    assert set(seen) == set(STATUS.values()), "the mixture has every outcome"
    assert gauges["tfexport_requests_running"] == gauges["tfexport_requests_waiting"] == 0
    assert gauges["tfexport_slots_used"] == 0
    assert gauges["tfexport_slots"] == 32
