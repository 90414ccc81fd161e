"""Batches of the concat form: tensors that each step returns longer, so all rows stay equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from tfexport.contract import FLOAT, SOURCE_MASK, key_value_names
from tfexport.errors import InputError
from tfexport.runtime.ort.device import host_value
from tfexport.runtime.ort.graphs import OrtGraphs, Step
from tfexport.runtime.ort.lengths import rows_of
from tfexport.runtime.session import (
    Candidates,
    Ids,
    Mask,
    Prompts,
    check_prompts,
    check_rows,
    check_score_step,
    check_source,
    check_sources,
    check_step,
    close_up,
)


class ConcatBatch:
    """Sources that begin together; see `Batch`.

    Attributes:
        width: rows of each source.
        can_join: False.
        lengths: tokens in the cache of every row, all the same.
    """

    can_join = False

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        """Start empty."""
        self.width = width
        self.lengths: Ids = np.zeros(0, np.int64)
        self._graphs = graphs
        self._source_mask: Mask = np.zeros((0, 0), np.bool_)
        self._cross: list[ort.OrtValue] = []
        self._past: list[ort.OrtValue] = []

    def add(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        """Let sources begin; see `Batch.add`.

        Raises:
            InputError: others are being decoded, or the prompts are of unequal length.
        """
        spec, new = self._graphs.spec, len(source_ids)
        check_source(spec, source_ids, source_mask)
        check_prompts(spec, new, prompts)
        if self.lengths.size or len({len(prompt) for prompt in prompts}) > 1:
            raise InputError(
                "the concat form keeps all rows equally long: sources begin together, with equally long prompts; "
                "use the form static or contrib"
            )
        io = self._graphs.bind_encoder(source_ids, source_mask)
        for name in key_value_names("cross", spec.layers):
            self._graphs.device.bind_output(io, name)
        self._graphs.run_encoder(io, *source_ids.shape)
        self._cross, self._source_mask = list(io.get_outputs()), source_mask.copy()
        self._past = [
            self._graphs.device.empty((new, spec.cache_heads, 0, width), FLOAT[spec.precision])
            for width in [spec.head_dim, spec.value_dim] * spec.layers
        ]
        read: Ids = np.array([prompt[:-1] for prompt in prompts], np.int64)
        if read.size:
            self._run(read, 1)
        self._past = self._take(self._past, np.arange(new).repeat(self.width))
        self.lengths = np.full(new * self.width, read.shape[1])

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read one token of every row; see `Batch.step`."""
        check_step(self._graphs.spec, self.lengths, target_ids, num_candidates)
        return self._step(target_ids, num_candidates).candidates()

    def score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        """Read one token of every row; see `ScoresTokens.score_step`."""
        check_score_step(self._graphs.spec, self.lengths, target_ids, next_ids)
        return self._step(target_ids, None).given(next_ids)

    def reorder(self, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Batch.reorder`."""
        check_rows(self.lengths, self.width, rows)
        if not np.array_equal(rows, np.arange(rows.size)):
            self._past = self._take(self._past, rows)

    def remove(self, sources: Ids) -> None:
        """Let sources leave, the last ones take their places; see `Batch.remove`."""
        check_sources(len(self._source_mask), sources)
        kept = close_up(len(self._source_mask), sources)
        rows = rows_of(kept, self.width)
        self._cross, self._source_mask = self._take(self._cross, kept), self._source_mask[kept]
        self._past, self.lengths = self._take(self._past, rows), self.lengths[rows]

    def _step(self, target_ids: Ids, num_candidates: int | None) -> Step:
        step = self._run(target_ids[:, None], num_candidates)
        self.lengths = self.lengths + 1
        return step

    def _run(self, target_ids: Ids, num_candidates: int | None) -> Step:
        """Read tokens, int64 [rows, target_len], and make what comes out the next past."""
        graphs, layers = self._graphs, self._graphs.spec.layers
        step = Step(graphs, len(target_ids), num_candidates, target_len=target_ids.shape[1], reads_lengths=False)
        step.io.bind_ortvalue_input(SOURCE_MASK, graphs.device.upload(self._source_mask))
        for prefix, values in (("cross", self._cross), ("past", self._past)):
            for name, value in zip(key_value_names(prefix, layers), values, strict=True):
                step.io.bind_ortvalue_input(name, value)
        present = key_value_names("present", layers)
        for name in present:
            graphs.device.bind_output(step.io, name)
        step.run(target_ids, self.lengths)
        self._past = list(step.io.get_outputs())[-len(present) :]
        return step

    def _take(self, values: Sequence[ort.OrtValue], rows: Ids) -> list[ort.OrtValue]:
        """Take rows of keys and values, [rows, …] → [new_rows, …], without leaving the device."""
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
