"""Call the C interface with random arguments, valid and invalid ones; run by `test_native_fuzz` under sanitizers.

python native_fuzz.py LIBRARY SEED CALLS WEIGHTS...: each of WEIGHTS is a file of `CONFIGS`, in order.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.native_configs import CONFIGS
from tfexport.errors import BackendError
from tfexport.nn.config import TransformerConfig
from tfexport.runtime.native import _library, _plan
from tfexport.runtime.native._library import Library, NextTensor, TensorView

ODD = (-1, 0, 1, 2, 3, 5, 24, 25, 2**24, 2**24 + 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1)


class Fuzz:
    """Objects of the library, and random calls on them."""

    def __init__(self, library: Library, rng: np.random.Generator, files: list[Path]) -> None:
        self.library, self.rng, self.files = library, rng, files
        self.counts = {"done": 0, "refused": 0}
        self.batches: list[tuple[int, int, int]] = []  # address, width, rows as far as known
        self.held: object = None

    def call(self, name: str, *arguments: object) -> bool:
        try:
            self.library.call(name, *arguments)
        except BackendError:
            self.counts["refused"] += 1
            return False
        self.counts["done"] += 1
        return True

    def size(self, usual: int) -> int:
        return int(self.rng.choice(ODD)) if self.rng.random() < 0.1 else usual

    def ids(self, count: int, end: int) -> np.ndarray:
        ids = self.rng.integers(0, end, max(count, 1))
        if self.rng.random() < 0.1:
            ids[self.rng.integers(ids.size)] = self.rng.choice([-1, end, 2**62, -(2**63)])
        return ids

    def model(self) -> int | None:
        """Make a model; often one of its fields or tensors is wrong."""
        number = int(self.rng.integers(len(CONFIGS)))
        config = list(CONFIGS.values())[number]
        tensors = [*_plan.tensors(config, self.files[number])]
        views = [TensorView() if tensor is None else tensor.view() for tensor in tensors]
        given = _plan.config_of(config)
        wrong = self.rng.random()
        if wrong < 0.3:
            part = [given, given.encoder, given.decoder][self.rng.integers(3)]
            # Switches and sizes; more layers or other sizes do not fit the tensors.
            fields = [name for name, kind in part._fields_ if kind in (ctypes.c_int64, ctypes.c_int32)]
            odd = int(self.rng.choice(ODD))
            setattr(part, str(self.rng.choice(fields)), odd)
        elif wrong < 0.5:
            view = views[self.rng.integers(len(views))]
            name = str(self.rng.choice(["values", "scales", "zeros", "rows", "columns", "block"]))
            is_pointer = name in ("values", "scales", "zeros")
            odd = int(self.rng.choice(ODD))
            # Bytes that are called float32 would be read past their end.
            setattr(view, name, None if is_pointer else odd or int(name != "block") - 1)
        elif wrong < 0.6:
            del views[self.rng.integers(len(views))]
        made, left = ctypes.c_void_p(), iter(views)

        def give(to: Any) -> int:
            view = next(left, None)
            if view is not None:
                to[0] = view
            return int(view is None)

        if not self.call("model", given, NextTensor(give), ctypes.byref(made)):
            return None
        self.held = tensors  # tables are read there
        return made.value

    def run(self, calls: int) -> None:
        """Decode on a model, and free its objects in any order."""
        model = self.model()
        if model is None:
            return
        config: TransformerConfig = next(iter(CONFIGS.values()))
        for _ in range(calls):
            if not self.batches or self.rng.random() < 0.1:
                made, width = ctypes.c_void_p(), self.size(int(self.rng.integers(1, 6)))
                threads = min(self.size(int(self.rng.integers(1, 4))), 24)
                if self.call("batch", model, width, threads, ctypes.byref(made)):
                    assert made.value
                    if width < 100:
                        self.batches.append((made.value, width, 0))
                    else:
                        self.library.free("batch", made.value)
                continue
            self.on_batch(int(self.rng.integers(len(self.batches))), config)
        first = self.rng.random() < 0.5
        if first:
            self.library.free("model", model)
        for place in range(len(self.batches)):
            if first:
                self.on_batch(place, config)  # a batch keeps the weights of its model
            self.library.free("batch", self.batches[place][0])
        self.batches.clear()
        if not first:
            self.library.free("model", model)

    def on_batch(self, place: int, config: TransformerConfig) -> None:
        """Call a random function on a batch."""
        address, width, rows = self.batches[place]
        kind = self.rng.random() if rows else 0.0
        if kind < 0.3:
            rows += self.add(address, width, config)
        elif kind < 0.7:
            self.step(address, width, rows, config.target_vocab or 1)
        elif kind < 0.85:
            order = np.arange(rows) // width * width + self.rng.integers(0, width, rows)
            if self.rng.random() < 0.1:
                order[0] = self.rng.choice([-1, rows, rows - 1, 2**62])
            self.call("reorder", address, order.ctypes.data, self.size(rows))
        else:
            kept = self.rng.permutation(rows // width)[: self.rng.integers(0, rows // width + 1)]
            if kept.size and self.rng.random() < 0.1:
                kept[0] = self.rng.choice([-1, rows // width, kept[-1], 2**62])
            if self.call("remove", address, kept.ctypes.data, kept.size):
                rows = kept.size * width
        self.batches[place] = address, width, rows

    def add(self, address: int, width: int, config: TransformerConfig) -> int:
        """Add sources; return the number of new rows."""
        count, stride = int(self.rng.integers(1, 4)), int(self.rng.integers(1, 25))
        ids = self.ids(count * stride, config.source_vocab)
        lengths, read = self.rng.integers(1, stride + 1, count), self.rng.integers(1, 5, count)
        prompts = self.ids(int(read.sum()), config.target_vocab or 1)
        for array in (lengths, read):
            if self.rng.random() < 0.05:
                array[0] = self.rng.choice([-1, 0, 2**24, 2**62])
        addresses = [array.ctypes.data for array in (lengths, prompts, read)]
        return count * width * self.call("add", address, count, ids.ctypes.data, stride, *addresses)

    def step(self, address: int, width: int, rows: int, vocab: int) -> None:
        """Take steps, with candidates or with given tokens."""
        steps, candidates = int(self.rng.integers(1, 4)), int(self.rng.integers(1, vocab + 1))
        out = [np.empty(rows * candidates * steps, kind) for kind in (np.int64, np.float32, np.float32)]
        found = [array.ctypes.data if self.rng.random() > 0.02 else None for array in out]
        ids, given, size = self.ids(rows, vocab), self.ids(rows, vocab), self.size(rows)
        kind = self.rng.random()
        if kind < 0.3 and width > 1:
            self.beams(address, width, rows, vocab)
        elif kind < 0.3:
            stops, taken = self.ids(3, vocab), ctypes.c_int64()
            banned = self.ids(2, vocab)
            more = steps, stops.ctypes.data, stops.size, banned.ctypes.data, banned.size
            self.call("steps", address, ids.ctypes.data, size, candidates, *more, *found, ctypes.byref(taken))
        elif kind < 0.5:
            self.call("step", address, ids.ctypes.data, size, 1, given.ctypes.data, *found)
        else:
            self.call("step", address, ids.ctypes.data, size, candidates, None, *found)

    def beams(self, address: int, width: int, rows: int, vocab: int) -> None:
        """Take steps of beam searches, some with wrong sizes or missing arrays."""
        steps, sources = int(self.rng.integers(1, 6)), rows // width
        room, candidates = int(self.rng.integers(20, 40)), min(int(self.rng.integers(2, 12)), vocab)
        ends, most = self.rng.integers(0, vocab, self.rng.integers(1, 4)), 2 * rows
        num_new = self.rng.integers(0, 4, sources)
        limits, shortest = num_new + self.rng.integers(steps, steps + 3, sources), self.rng.integers(0, 6, sources)
        running, scores = self.rng.standard_normal((2, rows)).astype(np.float32)
        if self.rng.random() < 0.5:
            scores[:] = -np.inf
        arrays = [ends, np.ones(20, np.float32), limits, shortest, num_new, np.zeros(sources, np.int64)]
        arrays += [self.ids(rows * room, vocab).reshape(rows, room), running, scores]
        arrays += [np.empty(most, np.int64), np.empty(most, np.int64), np.empty((most, room), np.int64)]
        arrays += [np.empty(most, np.float32), np.empty(most, np.float32)]
        sizes = [candidates, int(self.rng.integers(width, width * candidates + 1)), int(self.rng.integers(3))]
        sizes += [room, ends.size, 20, most, 0]
        if self.rng.random() < 0.2:
            # Smaller sizes; larger ones than those of the arrays cannot be noticed.
            sizes[self.rng.integers(6)] = int(self.rng.choice([-1, 0, 1, -(2**63)]))
        pointers = [array.ctypes.data if self.rng.random() > 0.01 else None for array in arrays]
        given, taken = _library.BeamArrays(*sizes, *pointers), ctypes.c_int64()
        odd = int(self.rng.choice(ODD)) if self.rng.random() < 0.1 else steps
        self.call("beams", address, ctypes.byref(given), self.size(rows), odd, ctypes.byref(taken))


def main(library: str, seed: str, calls: str, *files: str) -> None:
    fuzz = Fuzz(Library(Path(library)), np.random.default_rng(int(seed)), [Path(file) for file in files])
    for _ in range(30):
        fuzz.run(int(calls))
    print(fuzz.counts)


if __name__ == "__main__":
    assert _library.VERSION
    main(*sys.argv[1:])
