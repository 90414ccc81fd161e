"""The systems that are compared: python -m workers NAME answers requests, in the environment of that system.

Only the standard library is imported before a system is loaded, since no environment has everything. Requests and
answers are lines of JSON, see `Server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import selectors
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Ids = list[int]
Sources = Sequence[Sequence[int]]
# Callers that make one call per request; the longest wait and the most requests of a window; batches of a corpus.
CLIENTS, WINDOW_S, BATCH_SIZE = 8, 0.005, 32
LONGEST = 120


class System(ABC):
    """One system: how it loads weights and decodes."""

    libraries: tuple[str, ...]

    @abstractmethod
    def import_library(self) -> None:
        """Import what `load` needs, so that its time is measured separately."""

    @abstractmethod
    def load(self, folder: Path, precision: str, threads: int | None, parallel: int = 1) -> None:
        """Load a model; None is the system's own number of threads; `parallel` batches may run at once."""

    @abstractmethod
    def call(self, sources: Sources, num_beams: int, new_tokens: int, exact: bool) -> Callable[[], Any]:
        """Return the call to time: one batch with exactly `new_tokens` each, or batches of 32 to the end of texts."""

    @abstractmethod
    def tokens(self, found: Any) -> list[Ids]:
        """Return the best hypothesis of each source from the result of a call."""

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Write a model directory in the format that `load` reads."""
        raise NotImplementedError("bundles are made by tfexport onnx")


class Tfexport(System):
    """A bundle with default settings, in this or another revision of tfexport."""

    libraries = ("tfexport", "onnxruntime", "numpy")

    def import_library(self) -> None:
        import onnxruntime  # noqa: F401

        import tfexport

        _ = tfexport.load

    def load(self, folder: Path, precision: str, threads: int | None, parallel: int = 1) -> None:
        import tfexport

        self.model = tfexport.load(folder, **({} if threads is None else {"threads": threads}))

    def call(self, sources: Sources, num_beams: int, new_tokens: int, exact: bool) -> Callable[[], Any]:
        from tfexport.generation import DecodeConfig

        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens if exact else 0}
        # CTranslate2 returns no scores by default. Earlier revisions always do.
        if hasattr(DecodeConfig, "return_scores"):
            lengths["return_scores"] = False
        batch_size = len(sources) if exact else BATCH_SIZE
        return lambda: self.model.generate_ids(sources, batch_size=batch_size, num_beams=num_beams, **lengths)

    def tokens(self, found: Any) -> list[Ids]:
        return [list(hypotheses[0].token_ids) for hypotheses in found]


class CTranslate2(System):
    """A CTranslate2 model whose tokens are ids in decimal, except for those that start and end a text."""

    libraries = ("ctranslate2", "numpy")
    # int8: weights and activations of 8 bits, quantized by row, with sums in float32.
    compute_types = {"fp32": "float32", "int8": "int8"}  # noqa: RUF012 - a constant

    def import_library(self) -> None:
        import ctranslate2  # noqa: F401

    def convert(self, weights: Path, target: Path, precision: str) -> None:
        from converters import write_ctranslate2

        write_ctranslate2(weights, target, None if precision == "fp32" else self.compute_types[precision])

    def load(self, folder: Path, precision: str, threads: int | None, parallel: int = 1) -> None:
        import ctranslate2

        self.translator = ctranslate2.Translator(
            str(folder),
            device="cpu",
            compute_type=self.compute_types[precision],
            inter_threads=parallel,
            intra_threads=threads or 0,
        )
        words = json.loads(next(folder.glob("*vocabulary.json")).read_text())
        self.ids = {word: token for token, word in enumerate(words)}

    def call(self, sources: Sources, num_beams: int, new_tokens: int, exact: bool) -> Callable[[], Any]:
        words = [[str(token) for token in source] for source in sources]  # not timed
        return lambda: self.translator.translate_batch(
            words,
            beam_size=num_beams,
            min_decoding_length=new_tokens if exact else 0,
            max_decoding_length=new_tokens,
            max_input_length=0,
        )

    def tokens(self, found: Any) -> list[Ids]:
        return [[self.ids[word] for word in best.hypotheses[0]] for best in found]


class Server:
    """Answer requests for one system; each public method is an operation."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._timed: Callable[[], Any] | None = None

    def convert(self, weights: str, target: str, precision: str) -> dict[str, Any]:
        """Write the system's own format of a model directory."""
        self._system.convert(Path(weights), Path(target), precision)
        return {}

    def load(self, folder: str, precision: str, threads: int | None, parallel: int = 1) -> dict[str, Any]:
        """Import the library and load the model, both timed."""
        import_s, _ = clock(self._system.import_library)
        load_s, _ = clock(lambda: self._system.load(Path(folder), precision, threads, parallel))
        versions = {name: version(name) for name in self._system.libraries}
        return {"import_s": import_s, "load_s": load_s, "versions": versions}

    def call(self, sources: Sources, num_beams: int, new_tokens: int, exact: bool = True) -> dict[str, Any]:
        """Decode once, and keep the call for `time`."""
        self._timed = self._system.call(sources, num_beams, new_tokens, exact)
        seconds, found = clock(self._timed)
        return {"seconds": seconds, "outputs": self._system.tokens(found)}

    def time(self) -> dict[str, Any]:
        """Decode once more."""
        assert self._timed is not None, "call comes before time"
        return {"seconds": clock(self._timed)[0]}

    def peak(self) -> dict[str, Any]:
        """Return the peak memory of this process; getrusage would include that of the parent."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return {"bytes": next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))}

    def answer(
        self, policy: str, sources: list[Ids], arrivals: Sequence[float] | None, limit_s: float
    ) -> dict[str, Any]:
        """Answer requests that arrive at once or on a schedule, see `run_load`."""

        def decode(batch: list[Ids]) -> list[Ids]:
            found = self._system.tokens(self._system.call(batch, 1, LONGEST, False)())
            return found if isinstance(self._system, CTranslate2) else [ids[:-1] for ids in found]  # without the end

        return run_load(policy, decode, sources, Ledger(arrivals, len(sources), limit_s))


class EngineServer:
    """The serving engine of tfexport, under the policy "engine"."""

    def load(self, folder: str, precision: str, threads: int | None, parallel: int = 1) -> dict[str, Any]:
        """Start an engine on its own event loop, which runs only while a request is answered."""
        from tfexport.serve.config import ServingConfig
        from tfexport.serve.engine import Engine

        # Waiting requests are never refused: they show in the latencies.
        config = ServingConfig(slots=BATCH_SIZE, max_waiting=1_000_000, max_waiting_tokens=1_000_000_000)
        # Other selectors wake up as much as a millisecond late.
        self._runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
        self._engine = self._runner.run(Engine(Path(folder), config, threads=threads).start())
        return {"versions": {name: version(name) for name in Tfexport.libraries}}

    def answer(
        self, policy: str, sources: list[Ids], arrivals: Sequence[float] | None, limit_s: float
    ) -> dict[str, Any]:
        """Submit requests as they arrive."""
        return self._runner.run(self._answer(sources, Ledger(arrivals, len(sources), limit_s)))

    async def _answer(self, sources: list[Ids], ledger: Ledger) -> dict[str, Any]:
        from tfexport.generation import DecodeConfig

        greedy = DecodeConfig(max_new_tokens=LONGEST)

        async def one(number: int) -> None:
            (best,) = await self._engine.generate_ids(sources[number], config=greedy)
            ledger.note(number, list(best.token_ids[:-1]))

        try:
            async with asyncio.timeout(ledger.seconds_left), asyncio.TaskGroup() as group:
                for number in range(len(sources)):
                    await asyncio.sleep(max(0.0, ledger.wait_for(number)))
                    group.create_task(one(number))
        except TimeoutError:
            pass
        return ledger.close()


class Ledger:
    """Arrivals, answers and latencies of requests; waiting ends after `limit_s`."""

    def __init__(self, arrivals: Sequence[float] | None, count: int, limit_s: float) -> None:
        self.arrivals = arrivals or [0.0] * count
        self.ended: list[float | None] = [None] * count
        self.outputs: list[Ids] = [[] for _ in range(count)]
        self._cpu, self.began = time.process_time(), time.perf_counter()
        self._until = self.began + self.arrivals[-1] + limit_s

    @property
    def seconds_left(self) -> float:
        """Seconds until the remaining requests are given up."""
        return self._until - time.perf_counter()

    def wait_for(self, number: int) -> float:
        """Return the seconds until a request arrives."""
        return self.began + self.arrivals[number] - time.perf_counter()

    def note(self, number: int, output: Ids) -> None:
        """Record an answer."""
        self.ended[number], self.outputs[number] = time.perf_counter() - self.began, output

    def close(self) -> dict[str, Any]:
        """Return wall and CPU seconds, latencies (null for requests without an answer), and outputs."""
        return {
            "wall_s": time.perf_counter() - self.began,
            "cpu_s": time.process_time() - self._cpu,
            "latencies_s": [
                None if end is None else end - arrival for end, arrival in zip(self.ended, self.arrivals, strict=True)
            ],
            "outputs": self.outputs,
        }


def run_load(
    policy: str, decode: Callable[[list[Ids]], list[Ids]], sources: Sequence[Ids], ledger: Ledger
) -> dict[str, Any]:
    """Answer requests with one call per request from 8 threads ("threads"), or one call per window ("window")."""
    arrived: queue.Queue[int | None] = queue.Queue()
    size, wait_s = (1, 0.0) if policy == "threads" else (BATCH_SIZE, WINDOW_S)

    def work() -> None:
        while (numbers := _collect(arrived, size, wait_s)) is not None:
            if ledger.seconds_left > 0:
                for number, output in zip(numbers, decode([sources[number] for number in numbers]), strict=True):
                    ledger.note(number, output)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS if policy == "threads" else 1)]
    for thread in threads:
        thread.start()
    for number in range(len(sources)):
        time.sleep(max(0.0, ledger.wait_for(number)))
        arrived.put(number)
    for _ in threads:
        arrived.put(None)
    for thread in threads:
        thread.join()
    return ledger.close()


def _collect(arrived: queue.Queue[int | None], size: int, wait_s: float) -> list[int] | None:
    """Wait for a request and those that arrive within the window; None at the end."""
    numbers, until = [], None
    while len(numbers) < size:
        try:
            number = arrived.get(timeout=None if until is None else max(0.0, until - time.perf_counter()))
        except queue.Empty:
            break
        if number is None:
            if not numbers:
                return None
            arrived.put(None)
            break
        numbers.append(number)
        until = until or time.perf_counter() + wait_s
    return numbers


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def answer_requests(server: object) -> None:
    """Answer {"op": METHOD, ...} with the result of the method, or with {"error": LINE}, until standard input ends."""
    # Standard output is for answers only: what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 - every error of a system is an answer
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


SERVERS: dict[str, Callable[[], object]] = {
    "tfexport": lambda: Server(Tfexport()),
    "revision": lambda: Server(Tfexport()),
    "ctranslate2": lambda: Server(CTranslate2()),
    "engine": EngineServer,
}

if __name__ == "__main__":
    answer_requests(SERVERS[sys.argv[1]]())
