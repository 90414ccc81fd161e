"""Load graphs on a device, manage its memory, and bind and run decoder steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.contract import (
    CACHE,
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    LOG_NORMALIZER,
    LOGITS,
    LOGITS_TO_KEEP,
    NUM_CANDIDATES,
    ORDER,
    REORDER,
    REORDERED,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    Device,
    GraphSpec,
    ModelSpec,
    TensorSpec,
    contract_problems,
    graph_contract,
    has_speculation,
    key_value_names,
)
from tfexport.errors import BackendError, BundleError, first_line, raise_all
from tfexport.precision import DType, WeightType
from tfexport.runtime.ort._providers import PROVIDERS
from tfexport.runtime.ort.int8_products import int8_session_options
from tfexport.runtime.session import Candidates, Ids, Mask, given_candidates, in_order_of_id

Array = NDArray[Any]

# TensorProto.DataType
ELEMENT_TYPE: dict[DType, int] = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
# Types of inputs and outputs in ONNX Runtime, and the dtypes of the contract.
_DTYPE: dict[str, DType] = {f"tensor({'float' if dtype == 'float32' else dtype})": dtype for dtype in ELEMENT_TYPE}
ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# Decoder threads that sleep between two steps have to be woken for each. If they spun for longer, they would take cores
# from the next encoder run. Encoder threads stop spinning after each run.
STEP_SPIN_US = 1000
# ONNX Runtime counts items in 32 bits without a check (onnxruntime/core/providers/cuda/tensor/gather_impl.cu).
MAX_ITEMS = 2**31 - 1
# Overhead of one encoder run, in tokens: between 20 and 70 for small and large models.
RUN_TOKENS = 64
# Most attention scores per head in one encoder run. The operators store those of all rows at once, 4 bytes each. Many
# long sources in one run gain nothing, because one source keeps the processor busy.
MAX_SCORES = 2**21


class OrtDevice:
    """A device and its memory; of several GPUs the first in CUDA_VISIBLE_DEVICES.

    NumPy never reads the device's memory. Arrays are copied to it and from it, so the code is the same for a GPU and
    the CPU.
    """

    def __init__(self, device: Device = "cpu", weights: WeightType | None = None) -> None:
        """Open a device.

        Args:
            device: raises `BackendError` if ONNX Runtime cannot use it.
            weights: type of quantized weights; raises `BackendError` if their products are wrong on this device.
        """
        self.provider, self.type = PROVIDERS[device], device
        self.provider.prepare()
        self._config_entries = int8_session_options() if weights else {}

    def load(self, graph: Path, name: str, threads: int | None, *, spin_us: int = 0) -> ort.InferenceSession:
        """Load a graph, called `name` in errors.

        `threads` is the number of CPU threads of one call, None for one on each core. They spin for `spin_us`
        microseconds while they wait for the next run.

        Raises:
            BackendError: the graph does not load.
            PlacementError: part of the graph would run on another device.
        """
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        entries = {"session.record_ep_graph_assignment_info": "1", **self._config_entries}
        if spin_us:
            entries["session.intra_op.spin_duration_us"] = str(spin_us)
        else:
            entries["session.force_spinning_stop"] = "1"
        for key, entry in entries.items():
            options.add_session_config_entry(key, entry)
        provider = self.provider
        try:
            session = ort.InferenceSession(
                str(graph), options, providers=[(provider.ort_name, provider.options)], enable_fallback=0
            )
        except Exception as error:
            raise BackendError(
                f"ort: {name} does not load in onnxruntime {ort.__version__}, which must be {provider.minimum} "
                f"or newer on {self.type}: {first_line(error)}"
            ) from error
        if not provider.is_host:
            provider.check_placement(session, name)
        return session

    def empty(self, shape: Sequence[int], dtype: DType) -> ort.OrtValue:
        """Allocate uninitialized memory."""
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), ELEMENT_TYPE[dtype], self.type, 0)

    def upload(self, array: Array) -> ort.OrtValue:
        """Copy an int64 or bool array to the device."""
        value = self.empty(array.shape, "bool" if array.dtype == np.bool_ else "int64")
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        """Let ONNX Runtime allocate an output on the device."""
        binding.bind_output(name, self.type, 0)

    def reserve(self, num_bytes: int) -> ort.OrtValue:
        """Allocate uninitialized bytes, to be bound by address."""
        return ort.OrtValue.ortvalue_from_shape_and_type([num_bytes], np.uint8, self.type, 0)

    def zeros(self, num_bytes: int) -> ort.OrtValue:
        """Allocate zero bytes."""
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(num_bytes, np.uint8), self.type, 0)


def check_contract(session: ort.InferenceSession, name: str, spec: ModelSpec) -> None:
    """Raise `BundleError` if a loaded graph's inputs or outputs are not as expected."""
    inputs, outputs = (
        tuple(TensorSpec(one.name, _DTYPE.get(one.type, one.type), tuple(one.shape)) for one in side)
        for side in (session.get_inputs(), session.get_outputs())
    )
    found = GraphSpec(inputs, outputs)
    problems = contract_problems(found, graph_contract(spec, name, speculation=has_speculation(found)))
    raise_all(BundleError, f"graph {name}", problems, remedy="export the bundle again")


def host_value(array: Array) -> ort.OrtValue:
    """Wrap a host array, which the value shares; a binding does not keep it alive."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def run(session: ort.InferenceSession, binding: ort.IOBinding, *, gives_back: bool = False) -> None:
    """Run a graph on a binding and wait for it.

    `gives_back` frees the host memory of the run; otherwise ONNX Runtime keeps it for the next run.

    Raises:
        BackendError: the run failed.
    """
    options = None
    if gives_back:
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:
        raise BackendError(f"ort: the graph failed while running: {first_line(error)}") from error


def still_open(session: ort.InferenceSession | None) -> ort.InferenceSession:
    """Return a graph; raise `BackendError` if its session is closed."""
    if session is None:
        raise BackendError("ort: this session is closed; load the bundle again")
    return session


class RowGather:
    """The graph `reorder`, which copies rows on the device."""

    def __init__(self, device: OrtDevice, graph: Path, dtype: DType) -> None:
        """Load the graph for items of type `dtype`."""
        self.device, self.dtype = device, dtype
        # More threads do not speed up copies, and idle ones would take cores from the decoder.
        self._graph = device.load(graph, REORDER, 1)

    def copy(self, memory: ort.OrtValue, width: int, order: Ids, address: int) -> None:
        """Write row order[r] of some memory to row r at an address, without overlap.

        The memory is read as [rows, width]; `order` is int64 of any shape.
        """
        kind, element = self.device.type, ELEMENT_TYPE[self.dtype]
        rows = memory.tensor_size_in_bytes() // ITEM_BYTES[self.dtype] // width
        items = max(rows, order.size) * width
        if items > MAX_ITEMS:
            raise BackendError(
                f"ort: caches of {items:,} numbers cannot be moved on a GPU, at most {MAX_ITEMS:,}; lower batch_size"
            )
        io, uploaded = self._graph.io_binding(), self.device.upload(order.ravel())
        io.bind_input(CACHE, kind, 0, element, [rows, width], memory.data_ptr())
        io.bind_ortvalue_input(ORDER, uploaded)
        io.bind_output(REORDERED, kind, 0, element, [order.size, width], address)
        run(self._graph, io)


@dataclass
class OrtGraphs:
    """The loaded graphs of a session, and the names of their keys and values."""

    spec: ModelSpec
    device: OrtDevice
    encoder: ort.InferenceSession | None  # None after the session is closed
    decoder: ort.InferenceSession | None  # None for an encoder-only bundle, and after the session is closed
    gather: RowGather | None  # None if NumPy moves rows on the host

    def __post_init__(self) -> None:
        layers = self.spec.layers
        self.cross, self.past, self.present = (key_value_names(side, layers) for side in ("cross", "past", "present"))
        inputs = self.decoder.get_inputs() if self.decoder else []
        # Whether the decoder returns the logits of several positions (`--speculation`).
        self.keeps_logits = any(tensor.name == LOGITS_TO_KEEP for tensor in inputs)

    def bind_encoder(self, source_ids: Ids, source_mask: Mask) -> ort.IOBinding:
        """Bind the inputs of the encoder; the caller binds the outputs."""
        io = still_open(self.encoder).io_binding()
        for name, array in ((SOURCE_IDS, source_ids), (SOURCE_MASK, source_mask)):
            io.bind_ortvalue_input(name, self.device.upload(array))
        return io

    def run_encoder(self, io: ort.IOBinding, batch: int, longest: int) -> None:
        """Run the encoder on bound sources [batch, longest] and wait for it."""
        run(still_open(self.encoder), io, gives_back=self.device.provider.is_host and has_many_scores(batch, longest))


class Step:
    """A binding of the decoder for one number of rows, tokens and candidates.

    The caller binds sources and caches to `io`. All inputs and outputs are on the device, except num_candidates,
    because shapes are read on the host.
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
        """Bind inputs and outputs; without `num_candidates`, steps return all logits."""
        device, self._graphs = graphs.device, graphs
        self.io = still_open(graphs.decoder).io_binding()
        num_best = num_candidates or 1
        self._num_candidates = host_value(np.array([num_best]))  # the binding does not keep it alive
        self._target_ids = device.empty((rows, target_len), "int64")
        self._lengths = device.empty((rows,), "int64") if reads_lengths else None
        self._token_ids = device.empty((rows, num_best), "int64")
        self._logits = device.empty((rows, num_candidates or graphs.spec.vocab), "float32")
        self._log_normalizer = device.empty((rows, 1), "float32")
        # If an input is not on the graph's device, it is copied once, when it is bound. Therefore inputs that change
        # have to be on the device.
        self.io.bind_ortvalue_input(TARGET_IDS, self._target_ids)
        self.io.bind_ortvalue_input(NUM_CANDIDATES, self._num_candidates)
        if self._lengths is not None:
            self.io.bind_ortvalue_input(CACHE_LENGTHS, self._lengths)
        self.io.bind_ortvalue_output(CANDIDATE_IDS, self._token_ids)
        self.io.bind_ortvalue_output(CANDIDATE_LOGITS if num_candidates else LOGITS, self._logits)
        self.io.bind_ortvalue_output(LOG_NORMALIZER, self._log_normalizer)

    def run(self, target_ids: Ids, lengths: Ids) -> None:
        """Read tokens, int64 [rows, target_len] or [rows]; `lengths` is int64 [rows]."""
        self._target_ids.update_inplace(np.ascontiguousarray(target_ids))
        if self._lengths is not None:
            self._lengths.update_inplace(lengths)
        run(still_open(self._graphs.decoder), self.io)

    def candidates(self) -> Candidates:
        """Return copies of the last run's candidates."""
        # On the CPU, `numpy()` is a view that the next run overwrites.
        found = Candidates(
            self._token_ids.numpy().copy(), self._logits.numpy().copy(), self._log_normalizer.numpy()[:, 0].copy()
        )
        # CUDA's radix selection puts equal logits in order of id mod 256
        # (onnxruntime/core/providers/cuda/math/topk_impl.cuh).
        return found if self._graphs.device.provider.is_host else in_order_of_id(found)

    def given(self, next_ids: Ids) -> Candidates:
        """Return given tokens, int64 [rows], as candidates of a run that found all logits."""
        return given_candidates(next_ids, self._logits.numpy(), self._log_normalizer.numpy()[:, 0].copy())


def encoder_runs(lengths: Ids) -> list[Ids]:
    """Divide a batch into the encoder runs with the least total cost.

    The cost of a run is its number of rows times its longest source. In order of length, the cheapest division of the
    first n rows is one run that ends there, after the cheapest division of the rows before it. Runs with too many
    scores are cut; a source of more than 1,448 tokens always has its own run.

    Returns:
        Rows of each run, int64, longest source first; every row once.
    """
    order = (-lengths).argsort(kind="stable")
    longest, batch = lengths[order], lengths.size
    if longest[0] == longest[-1]:
        return _cut(order, int(longest[0]))
    costs, begins = np.zeros(batch + 1), [0]
    for end in range(1, batch + 1):
        ending_here = costs[:end] + longest[:end] * np.arange(end, 0, -1) + RUN_TOKENS
        begins.append(int(ending_here.argmin()))
        costs[end] = ending_here[begins[-1]]
    found, end = [], batch
    while end:
        found += _cut(order[begins[end] : end], int(longest[begins[end]]))[::-1]
        end = begins[end]
    return found[::-1]


def has_many_scores(batch: int, longest: int) -> bool:
    """Return whether a run has more scores than `MAX_SCORES`."""
    return batch * longest**2 > MAX_SCORES


def _cut(rows: Ids, longest: int) -> list[Ids]:
    most = max(MAX_SCORES // longest**2, 1)
    return [rows[first : first + most] for first in range(0, rows.size, most)]
