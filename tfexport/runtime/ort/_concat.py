"""Run the concat decoder: steps return longer caches, and rows are equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from tfexport.contract import SOURCE_MASK
from tfexport.errors import InputError
from tfexport.runtime.checked import CheckedScoring
from tfexport.runtime.ort._device import OrtGraphs, Step, host_value
from tfexport.runtime.session import Candidates, Ids, Mask, Prompts, close_up, prefilled, rows_of
from tfexport.runtime.sources import Sources


class ConcatBatch(CheckedScoring):
    """Sources that are added together, with equally long prompts."""

    can_join = False

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        super().__init__(graphs.spec, width)
        self._graphs = graphs
        self._source_mask: Mask = np.zeros((0, 0), np.bool_)
        self._cross: list[ort.OrtValue] = []
        self._past: list[ort.OrtValue] = []

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        new, device = len(sources), self._graphs.device
        if self.lengths.size or len({len(prompt) for prompt in prompts}) > 1:
            raise InputError(
                "all sources of a batch of the concat decoder variant must be added together, with equally long "
                "prompts; use the variant static or contrib"
            )
        io = self._graphs.bind_encoder(sources)
        for name in self._graphs.cross:
            io.bind_output(name, *device.place)
        self._graphs.run_encoder(io, sources)
        self._cross, self._source_mask = list(io.get_outputs()), sources.mask.copy()
        kind = self._spec.cache
        self._past = [device.empty(shape, kind.dtype) for shape in kind.shapes(new, 0)]
        read = prefilled(prompts)
        if read.size:
            self._run(read, 1)
        self._past = self._take(self._past, np.arange(new).repeat(self.width))
        self.lengths = np.full(new * self.width, read.shape[1])

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        return self._run(target_ids[:, None], num_candidates).candidates()

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        return self._run(target_ids[:, None], None).given(next_ids)

    def _reorder(self, rows: Ids) -> None:
        if not np.array_equal(rows, np.arange(rows.size)):
            self._past = self._take(self._past, rows)

    def _remove(self, sources: Ids) -> None:
        remaining = close_up(len(self._source_mask), sources)
        rows = rows_of(remaining, self.width)
        self._cross, self._source_mask = self._take(self._cross, remaining), self._source_mask[remaining]
        self._past, self.lengths = self._take(self._past, rows), self.lengths[rows]

    def _run(self, target_ids: Ids, num_candidates: int | None) -> Step:
        graphs = self._graphs
        step = Step(graphs, len(target_ids), num_candidates, target_ids.shape[1])
        step.io.bind_ortvalue_input(SOURCE_MASK, graphs.device.upload(self._source_mask))
        for name, value in zip((*graphs.cross, *graphs.past), (*self._cross, *self._past), strict=True):
            step.io.bind_ortvalue_input(name, value)
        for name in graphs.present:
            step.io.bind_output(name, *graphs.device.place)
        step.run(target_ids, self.lengths)
        self._past = list(step.io.get_outputs())[-len(graphs.present) :]
        self.lengths = self.lengths + target_ids.shape[1]
        return step

    def _take(self, values: Sequence[ort.OrtValue], rows: Ids) -> list[ort.OrtValue]:
        device, gather = self._graphs.device, self._graphs.gather
        if gather is None:
            return [host_value(value.numpy()[rows]) for value in values]
        taken = []
        for value in values:
            shape = value.shape()[1:]
            taken.append(device.empty((rows.size, *shape), gather.dtype))
            if rows.size and 0 not in shape:
                gather.copy(value, math.prod(shape), rows, taken[-1].data_ptr())
        return taken
