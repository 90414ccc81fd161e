"""Bind the arrays of a contrib decoder's step once, for all steps of equal shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfexport import contract
from tfexport.runtime.ort._device import Array, OrtGraphs, host_value, run
from tfexport.runtime.session import Candidates, Floats, Ids, Mask

_NOTHING = np.empty(0, np.float32)
_TRUE = np.array(True)
# Smaller keys and values of the encoder stay bound, because binding others takes longer.
_MAX_SOURCE_BYTES = 2**16


class Shape(NamedTuple):
    """Which rows a step reads and what it returns."""

    first: int  # source
    last: int  # excluded
    width: int  # rows of a source
    num_candidates: int
    target_len: int = 1  # tokens that are read of each row
    keeps: int = 1  # last tokens of each row whose candidates are returned
    scores: bool = False  # whether all logits are returned
    skips_scores: bool = False  # whether `log_normalizer` is 1 for rows that needed all logits


class Binding:
    """The arrays of steps of one shape, in buffers that NumPy and the graph share."""

    def __init__(self, graphs: OrtGraphs, cache: Floats, shape: Shape) -> None:
        first, last, width, num_candidates, target_len, keeps, scores, skips_scores = shape
        rows, found = (last - first) * width, (last - first) * width * keeps
        self._graphs, self._num_tokens, self._sources = graphs, rows * target_len, slice(first, last)
        self._width, self._shortlist = width, dict[str, Array]()
        self._io = graphs.decoder_for(self._num_tokens).io_binding()
        self.target_ids: Ids = np.empty((rows, target_len), np.int64)
        self.positions: Ids = np.empty((rows, target_len), np.int64)
        self.last_and_total = np.empty(rows + 1, np.int32)  # one array, so that both are filled at once
        self.token_ids: Ids = np.empty((found, num_candidates), np.int64)
        self.logits: Floats = np.empty((found, num_candidates), np.float32)
        self.log_normalizer: Floats = np.empty((found, 1), np.float32)
        self.all_logits: Floats = np.empty((found, graphs.spec.vocab if scores else 0), np.float32)
        self._cross: Sequence[Array] | None = None  # keys and values of the encoder that are bound
        inputs: dict[str, Array] = {
            contract.TARGET_IDS: self.target_ids,
            contract.NUM_CANDIDATES: np.array([num_candidates]),
        }
        if (kind := graphs.spec.cache).grows:
            inputs[contract.POSITIONS] = self.positions
            inputs[contract.LAST_POSITION] = self.last_and_total[:-1]
            inputs[contract.TOTAL_LENGTH] = self.last_and_total[-1:]
        else:
            inputs[contract.CACHE_LENGTHS] = self.positions[:, 0]
        if graphs.keeps_logits:
            inputs[contract.LOGITS_TO_KEEP] = np.array([keeps])
        outputs: dict[str, Array] = {
            contract.CANDIDATE_IDS: self.token_ids,
            contract.CANDIDATE_LOGITS: self.logits,
            contract.LOG_NORMALIZER: self.log_normalizer,
        }
        if scores:
            outputs[contract.LOGITS] = self.all_logits
        for name, array in inputs.items():
            self._io.bind_cpu_input(name, array)
        if skips_scores:
            self._io.bind_ortvalue_input(contract.WITHOUT_SCORES, host_value(_TRUE))
        for name, array in outputs.items():
            self._io.bind_ortvalue_output(name, host_value(array))
        shape_of_rows = kind.shapes(rows, cache.shape[3])[0]
        for past, present, buffer in zip(graphs.past, graphs.present, cache, strict=True):
            value = host_value(buffer[first * width : last * width].reshape(shape_of_rows))
            self._io.bind_ortvalue_input(past, value)
            self._io.bind_ortvalue_output(present, value)

    @property
    def output_bytes(self) -> int:
        """Size of the outputs."""
        return self.token_ids.nbytes + self.logits.nbytes + self.all_logits.nbytes

    def bind_sources(self, cross: Sequence[Array], mask: Mask) -> None:
        """Bind the sources of this shape, unless they are bound."""
        if self._cross is not cross:
            self._cross = cross
            self._io.bind_cpu_input(contract.SOURCE_MASK, mask[self._sources])
            for name, array in zip(self._graphs.cross, cross, strict=True):
                self._io.bind_cpu_input(name, array[self._sources])

    def bind_shortlist(self, tokens: dict[str, Array]) -> None:
        """Bind the inputs of a shortlist, unless they are bound."""
        if self._shortlist is not tokens:
            self._shortlist = tokens
            bias = tokens[contract.SHORTLIST_BIAS][self._sources].repeat(self._width, 0)
            for name, array in {**tokens, contract.SHORTLIST_BIAS: bias}.items():
                self._io.bind_cpu_input(name, array)

    def release_sources(self) -> None:
        """Let the memory of the sources be freed if it is large."""
        if self._shortlist:
            self.bind_shortlist(dict.fromkeys(self._shortlist, _NOTHING))
        if self._cross is not None and len(self._cross) * self._cross[0].nbytes > _MAX_SOURCE_BYTES:
            self._cross = None
            for name in (contract.SOURCE_MASK, *self._graphs.cross):
                self._io.bind_cpu_input(name, _NOTHING)

    def run(self) -> None:
        """Run the decoder on the inputs that the arrays hold."""
        run(self._graphs.decoder_for(self._num_tokens), self._io)

    def candidates(self) -> Candidates:
        """Return copies of the last run's candidates."""
        return Candidates(self.token_ids.copy(), self.logits.copy(), self.log_normalizer[:, 0].copy())
