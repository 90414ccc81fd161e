"""What a session has loaded and its batches run: the graphs, and memory where they run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from tfexport.contract import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    LOG_NORMALIZER,
    LOGITS,
    NUM_CANDIDATES,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    ModelSpec,
)
from tfexport.runtime.ort.cache import DeviceBuffers, HostBuffers, RowBuffers
from tfexport.runtime.ort.device import OrtDevice, host_value, run, still_open
from tfexport.runtime.ort.gather import RowGather
from tfexport.runtime.ort.lengths import has_many_scores
from tfexport.runtime.session import Candidates, Ids, Mask, given_candidates, in_order_of_id


@dataclass
class OrtGraphs:
    """The graphs of a session.

    Attributes:
        spec: sizes, limits and token ids.
        device: where the graphs run.
        encoder: None once the session is closed.
        decoder: None for an encoder alone, and once the session is closed.
        gather: moves rows on the device; None where numpy does on the host.
    """

    spec: ModelSpec
    device: OrtDevice
    encoder: ort.InferenceSession | None
    decoder: ort.InferenceSession | None
    gather: RowGather | None

    def buffers(self, rows: int, length: int) -> RowBuffers:
        """Make room for keys and values, of zeros."""
        if self.gather is None:
            return HostBuffers(self.spec, rows, length)
        return DeviceBuffers(self.spec, self.gather, rows, length)

    def bind_encoder(self, source_ids: Ids, source_mask: Mask) -> ort.IOBinding:
        """Bind the inputs of the encoder; the outputs are the caller's to bind, and to run."""
        io = still_open(self.encoder).io_binding()
        for name, array in ((SOURCE_IDS, source_ids), (SOURCE_MASK, source_mask)):
            io.bind_ortvalue_input(name, self.device.upload(array))
        return io

    def run_encoder(self, io: ort.IOBinding, batch: int, longest: int) -> None:
        """Run the encoder on what is bound, sources [batch, longest], and wait for it; see `device.run`."""
        run(still_open(self.encoder), io, gives_back=self.device.type == "cpu" and has_many_scores(batch, longest))


class Step:
    """A binding of the decoder for one number of rows, tokens and candidates, with all but sources and caches.

    It finds the best candidates, or the logits of the vocabulary.

    What a step reads and writes lies on the device but num_candidates: shapes are read on the host.

    Attributes:
        io: sources and caches are the caller's to bind.
    """

    def __init__(
        self,
        graphs: OrtGraphs,
        rows: int,
        num_candidates: int | None,
        *,
        target_len: int = 1,
        reads_lengths: bool = True,
    ) -> None:
        """Reserve what a step reads and writes, and bind it.

        Args:
            graphs: of the session.
            rows: that are decoded.
            num_candidates: best tokens of each; None for the logits of the vocabulary.
            target_len: tokens read of each.
            reads_lengths: whether the graph is told how full each cache is.
        """
        device, self._graphs = graphs.device, graphs
        self.io = still_open(graphs.decoder).io_binding()
        num_best = num_candidates or 1
        self._num_candidates = host_value(np.array([num_best]))  # a binding alone does not keep it alive
        self._target_ids = device.empty((rows, target_len), "int64")
        self._lengths = device.empty((rows,), "int64") if reads_lengths else None
        self._token_ids = device.empty((rows, num_best), "int64")
        self._logits = device.empty((rows, num_candidates or graphs.spec.vocab), "float32")
        self._log_normalizer = device.empty((rows, 1), "float32")
        # An input that lies elsewhere than the graph reads it is copied when it is bound, and not again: what a step
        # changes lies where it is read.
        self.io.bind_ortvalue_input(TARGET_IDS, self._target_ids)
        self.io.bind_ortvalue_input(NUM_CANDIDATES, self._num_candidates)
        if self._lengths is not None:
            self.io.bind_ortvalue_input(CACHE_LENGTHS, self._lengths)
        self.io.bind_ortvalue_output(CANDIDATE_IDS, self._token_ids)
        self.io.bind_ortvalue_output(CANDIDATE_LOGITS if num_candidates else LOGITS, self._logits)
        self.io.bind_ortvalue_output(LOG_NORMALIZER, self._log_normalizer)

    def run(self, target_ids: Ids, lengths: Ids) -> None:
        """Read tokens.

        Args:
            target_ids: int64 [rows, target_len] or, of one each, [rows].
            lengths: tokens in the cache of every row before, int64 [rows].
        """
        self._target_ids.update_inplace(np.ascontiguousarray(target_ids))
        if self._lengths is not None:
            self._lengths.update_inplace(lengths)
        run(still_open(self._graphs.decoder), self.io)

    def candidates(self) -> Candidates:
        """Return copies of what the last run found: on the CPU numpy() is a view of what the next one writes."""
        found = Candidates(
            self._token_ids.numpy().copy(), self._logits.numpy().copy(), self._log_normalizer.numpy()[:, 0].copy()
        )
        # CUDA's radix selection puts equal logits in order of id mod 256
        # (onnxruntime/core/providers/cuda/math/topk_impl.cuh).
        return found if self._graphs.device.type == "cpu" else in_order_of_id(found)

    def given(self, next_ids: Ids) -> Candidates:
        """Return what the last run found of given tokens, int64 [rows], where it found the logits of the vocabulary."""
        return given_candidates(next_ids, self._logits.numpy(), self._log_normalizer.numpy()[:, 0].copy())
