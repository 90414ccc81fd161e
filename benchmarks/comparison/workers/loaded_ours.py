"""tfexport under load: `generate_ids` called by others, and the serving engine, over the same loaded model."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.lengths import LONGEST
from comparison.workers import engine_costs
from comparison.workers.engine_costs import Steps
from comparison.workers.load import WINDOW_SIZE, Ids, Ledger
from comparison.workers.loaded import LoadServer
from comparison.workers.protocol import answer_requests
from tfexport.generation import DecodeConfig
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine

GREEDY = DecodeConfig(max_new_tokens=LONGEST)
# Nobody is refused: what waits too long shows in its latency.
SERVING = ServingConfig(slots=WINDOW_SIZE, max_waiting=1_000_000, max_waiting_tokens=1_000_000_000)


class Ours:
    """A bundle, loaded by an engine whose model others may call as well."""

    libraries = ("tfexport", "onnxruntime", "numpy")

    def load(self, folder: Path, precision: str, threads: int) -> None:
        """Start an engine on an event loop of its own, which turns only while it is asked."""
        # Other selectors wake up to a millisecond late.
        self.runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
        self.steps = Steps()
        self.engine = self.runner.run(Engine(folder, SERVING, observer=self.steps, threads=threads).start())

    def decode(self, sources: list[Ids]) -> list[Ids]:
        """Decode a batch; texts that are done leave it. The ends of texts are left out."""
        found = self.engine.model.generate_ids(sources, batch_size=WINDOW_SIZE, config=GREEDY)
        return [list(best.token_ids[:-1]) for (best,) in found]


class EngineServer(LoadServer):
    """One that knows a policy more, "slots", and what the engine costs."""

    system: Ours

    def answer(
        self, policy: str, sources: Sequence[Ids], arrivals: Sequence[float] | None, limit_s: float
    ) -> dict[str, Any]:
        """Answer all requests; those for slots go to the engine as they arrive."""
        if policy != "slots":
            return super().answer(policy, sources, arrivals, limit_s)
        return self.system.runner.run(_answer(self.system.engine, sources, arrivals, limit_s))

    def idle(self, sources: Sequence[Ids], tokens: int) -> dict[str, Any]:
        """Time one request at a time; see `engine_costs.idle`."""
        return self.system.runner.run(engine_costs.idle(self.system.engine, sources, tokens))

    def burst(self, sources: Sequence[Ids], tokens: int) -> dict[str, Any]:
        """Let many requests arrive at once; see `engine_costs.burst`."""
        return self.system.runner.run(engine_costs.burst(self.system.engine, self.system.steps, sources, tokens))

    def host(self, sources: Sequence[Ids], tokens: int) -> dict[str, Any]:
        """Count what is not the model's; see `engine_costs.host`."""
        return engine_costs.host(self.system.engine, sources, tokens)


async def _answer(
    engine: Engine, sources: Sequence[Ids], arrivals: Sequence[float] | None, limit_s: float
) -> dict[str, Any]:
    ledger = Ledger(arrivals, len(sources), limit_s)

    async def one(number: int) -> None:
        (best,) = await engine.generate_ids(sources[number], config=GREEDY)
        ledger.note(number, list(best.token_ids[:-1]))

    try:
        async with asyncio.timeout(ledger.arrivals[-1] + limit_s), asyncio.TaskGroup() as group:
            for number in range(len(sources)):
                await asyncio.sleep(max(0.0, ledger.wait_for(number)))
                group.create_task(one(number))
    except TimeoutError:
        pass
    return ledger.close()


if __name__ == "__main__":
    answer_requests(EngineServer(Ours()))
