"""Load graphs on a device, manage its memory, and bind and run decoder steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport import contract
from tfexport._io.names import PROFILE_START
from tfexport.contract import Device, ModelSpec, device_parts
from tfexport.errors import BackendError, BundleError, first_line, raise_all
from tfexport.precision import CALIBRATED, ITEM_BYTES, DType, Quantized
from tfexport.runtime.cpu import Threads
from tfexport.runtime.ort._providers import PROVIDERS
from tfexport.runtime.ort.int8_products import int8_session_options
from tfexport.runtime.session import Candidates, Floats, Ids, given_candidates, in_order_of_id
from tfexport.runtime.shortlist import Shortlist
from tfexport.runtime.sources import Sources

Array = NDArray[Any]

# TensorProto.DataType
ELEMENT_TYPE: dict[DType, int] = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
# Types of inputs and outputs in ONNX Runtime, and the dtypes of the contract.
_DTYPE: dict[str, DType] = {f"tensor({'float' if dtype == 'float32' else dtype})": dtype for dtype in ELEMENT_TYPE}
# Decoder threads that sleep between two steps have to be woken for each. If they spun for longer, they would take cores
# from the next encoder run. Encoder threads stop spinning after each run.
STEP_SPIN_US = 1000
# Compute calibrated graphs as they are: ONNX Runtime would move QuantizeLinear before operators without float8 kernels.
_QDQ_OPTIONS = {"session.disable_quant_qdq": "1"}
# If more rows of steps without scores need all logits than this share, such steps are slower. A few prove nothing.
_MOST_UNPROVEN, _FEW_UNPROVEN = 0.25, 64
# ONNX Runtime counts items in 32 bits without a check (onnxruntime/core/providers/cuda/tensor/gather_impl.cu).
MAX_ITEMS = 2**31 - 1
# Overhead of one encoder run, in tokens: between 20 and 70 for small and large models.
RUN_TOKENS = 16
# Most attention scores per head in one encoder run. The operators store those of all rows at once, 4 bytes each. Many
# long sources in one run gain nothing, because one source keeps the processor busy.
MAX_SCORES = 2**21


class OrtDevice:
    """A device and its memory."""

    def __init__(self, device: Device = "cpu", weights: Quantized | None = None, profile: Path | None = None) -> None:
        """Check that the device and products with quantized `weights` work.

        Each graph writes its events to a new folder in `profile`.
        """
        self._profile = profile
        self.place = kind, number = device_parts(device)
        self.provider, self.device = PROVIDERS[kind], device
        self.provider.prepare(number)
        self._options = {**self.provider.options, **({"device_id": str(number)} if number else {})}
        self._config_entries = _QDQ_OPTIONS if weights in CALIBRATED else int8_session_options() if weights else {}

    def load(self, graph: Path, name: str, threads: int | None, *, spin_us: int = 0) -> ort.InferenceSession:
        """Load a graph; its CPU threads (None: all cores) spin for `spin_us` between runs."""
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        stop = {"session.intra_op.spin_duration_us": str(spin_us)} if spin_us else {"session.force_spinning_stop": "1"}
        entries = {"session.record_ep_graph_assignment_info": "1", **stop, **self._config_entries}
        for key, entry in entries.items():
            options.add_session_config_entry(key, entry)
        provider, profile = self.provider, self._profile
        if profile:
            profile = profile / f"{len(list(profile.iterdir()))} {name}"
            profile.mkdir()
            options.enable_profiling, options.profile_file_prefix = True, str(profile / "events")
        try:
            session = ort.InferenceSession(
                str(graph), options, providers=[(provider.ort_name, self._options)], enable_fallback=0
            )
        except Exception as error:
            raise BackendError(
                f"ort: {name} does not load in onnxruntime {ort.__version__}, which must be {provider.minimum} "
                f"or newer on {self.device}: {first_line(error)}"
            ) from error
        if not provider.is_host:
            provider.check_placement(session, name)
        if profile:
            (profile / PROFILE_START).write_text(str(session.get_profiling_start_time_ns()))
        return session

    def empty(self, shape: Sequence[int], dtype: DType) -> ort.OrtValue:
        """Allocate uninitialized memory."""
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), ELEMENT_TYPE[dtype], *self.place)

    def upload(self, array: Array) -> ort.OrtValue:
        """Copy an int64, bool or float32 array to the device."""
        value = self.empty(array.shape, cast(DType, array.dtype.name))
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def bind_inputs(self, session: ort.InferenceSession, inputs: Mapping[str, Array]) -> ort.IOBinding:
        """Bind copies of arrays as inputs of a graph."""
        io = session.io_binding()
        for name, array in inputs.items():
            io.bind_ortvalue_input(name, self.upload(array))
        return io


def check_contract(session: ort.InferenceSession, name: str, spec: ModelSpec) -> None:
    """Raise `BundleError` if a graph has other inputs or outputs than its contract."""
    inputs, outputs = (
        tuple(contract.TensorSpec(one.name, _DTYPE.get(one.type, one.type), tuple(one.shape)) for one in side)
        for side in (session.get_inputs(), session.get_outputs())
    )
    found = contract.GraphSpec(inputs, outputs)
    expected = contract.graph_contract(spec, name, found)
    problems = contract.contract_problems(found, expected)
    raise_all(BundleError, f"graph {name}", problems, remedy="export the bundle again")


def host_value(array: Array) -> ort.OrtValue:
    """Wrap a host array without a copy; a binding does not keep it alive."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def run(graph: ort.InferenceSession, binding: ort.IOBinding, *, frees_memory: bool = False) -> None:
    """Run a graph on a binding and wait."""
    options = None
    if frees_memory:  # on the host, which ONNX Runtime otherwise keeps for the next run
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        graph.run_with_iobinding(binding, options)
    except Exception as error:
        raise _run_error(error) from error


def _run_error(error: Exception) -> BackendError:
    return BackendError(f"ort: the graph failed while running: {first_line(error)}")


def still_open(session: ort.InferenceSession | None) -> ort.InferenceSession:
    """Return a graph; raise `BackendError` if its session is closed."""
    if session is None:
        raise BackendError("ort: this session is closed; load the bundle again")
    return session


class RowGather:
    """The graph `reorder`, which copies rows on the device."""

    def __init__(self, device: OrtDevice, graph: Path, dtype: DType) -> None:
        self.device, self.dtype = device, dtype
        # More threads do not speed up copies, and idle ones would take cores from the decoder.
        self._graph = device.load(graph, contract.REORDER, 1)

    def copy(self, memory: ort.OrtValue, width: int, order: Ids, address: int) -> None:
        """Copy row order[r] of some memory, read as [rows, width], to row r at an address."""
        place, element = self.device.place, ELEMENT_TYPE[self.dtype]
        rows = memory.tensor_size_in_bytes() // ITEM_BYTES[self.dtype] // width
        items = max(rows, order.size) * width
        if items > MAX_ITEMS:
            raise BackendError(
                f"ort: caches of {items:,} numbers cannot be moved on a GPU, at most {MAX_ITEMS:,}; lower batch_size"
            )
        io, uploaded = self._graph.io_binding(), self.device.upload(order.ravel())
        io.bind_input(contract.CACHE, *place, element, [rows, width], memory.data_ptr())
        io.bind_ortvalue_input(contract.ORDER, uploaded)
        io.bind_output(contract.REORDERED, *place, element, [order.size, width], address)
        run(self._graph, io)


@dataclass
class OrtGraphs:
    """The loaded graphs of a session, and the names of their keys and values."""

    spec: ModelSpec
    device: OrtDevice
    encoder: ort.InferenceSession | None  # None after the session is closed
    decoder: ort.InferenceSession | None  # None for an encoder-only bundle, and after the session is closed
    gather: RowGather | None  # None if NumPy moves rows on the host
    # Runs of more tokens than its `encoder_alone` and `decoder_alone` use graphs that `load_several` loads.
    threads: Threads | None = None
    load_several: Callable[[Literal["encoder", "decoder"]], ort.InferenceSession] | None = None
    shortlist: Shortlist | None = None  # with `lookup`, the graph that looks up weights
    lookup: ort.InferenceSession | None = None

    def __post_init__(self) -> None:
        self._several: dict[str, ort.InferenceSession] = {}
        self._lock = threading.Lock()
        self.spare: list[Any] = []  # buffers that batches have left for later ones
        spec = self.spec
        self.cross, self.past, self.present = spec.cross.names("cross"), *map(spec.cache.names, ("past", "present"))
        inputs = {tensor.name for tensor in self.decoder.get_inputs()} if self.decoder else set()
        self.reads_lengths = contract.CACHE_LENGTHS in inputs
        # Whether the decoder returns the logits of several positions (`--speculation`).
        self.keeps_logits = contract.LOGITS_TO_KEEP in inputs
        optional = self.decoder.get_overridable_initializers() if self.decoder else []
        self._can_skip_scores = any(tensor.name == contract.WITHOUT_SCORES for tensor in optional)
        self.num_ranked = self.num_unproven = 0  # rows of steps without scores, and those that needed all logits

    @property
    def skips_scores(self) -> bool:
        """Whether steps without scores are faster, as far as is known."""
        return self._can_skip_scores and self.num_unproven < _FEW_UNPROVEN + self.num_ranked * _MOST_UNPROVEN

    def count_unproven(self, unproven: Floats) -> None:
        """Count rows of steps without scores; 1 for each that needed all logits."""
        self.num_ranked += unproven.size
        self.num_unproven += int(unproven.sum())

    def close(self) -> None:
        """Free the graphs, including those of open batches."""
        self.encoder = self.decoder = self.lookup = None
        self._several.clear()
        self.spare.clear()

    def encoder_for(self, sources: Sources) -> ort.InferenceSession:
        """Return the encoder with the threads for a batch."""
        most = self.threads.encoder_alone if self.threads else 0
        is_large = most and len(sources) * sources.source_len > most
        return self._for_several("encoder") if is_large else still_open(self.encoder)

    def decoder_for(self, tokens: int) -> ort.InferenceSession:
        """Return the decoder with the threads for a step that reads some tokens."""
        most = self.threads.decoder_alone if self.threads else 0
        return self._for_several("decoder") if most and tokens > most else still_open(self.decoder)

    def _for_several(self, name: Literal["encoder", "decoder"]) -> ort.InferenceSession:
        still_open(self.encoder)
        assert self.load_several is not None
        with self._lock:
            if name not in self._several:
                self._several[name] = self.load_several(name)
            return self._several[name]

    def encode(self, sources: Sources) -> list[Array]:
        """Run the encoder on the host; return keys and values, which belong to the caller."""
        graph = self.encoder_for(sources)
        try:  # not on a binding, which takes longer to create
            found: list[Array] = graph.run(self.cross, sources.inputs)
        except Exception as error:
            raise _run_error(error) from error
        return found

    def look_up(self, ids: Ids) -> list[Array]:
        """Return the weights and biases of tokens in the output projection."""
        found: list[Array] = still_open(self.lookup).run(
            [contract.SHORTLIST_WEIGHTS, contract.SHORTLIST_BIAS], {contract.SHORTLIST_IDS: ids}
        )
        return found

    def bind_encoder(self, sources: Sources) -> ort.IOBinding:
        """Bind the inputs of the encoder; the caller binds its outputs."""
        return self.device.bind_inputs(self.encoder_for(sources), sources.inputs)

    def run_encoder(self, io: ort.IOBinding, sources: Sources) -> None:
        """Run the encoder on bound sources and wait for it."""
        run(self.encoder_for(sources), io, frees_memory=self.device.provider.is_host and has_many_scores(sources))


class Step:
    """A binding of the decoder for one number of rows, tokens and candidates.

    The caller binds sources and caches to `io`.
    """

    def __init__(self, graphs: OrtGraphs, rows: int, num_candidates: int | None, target_len: int = 1) -> None:
        """Bind inputs and outputs; without `num_candidates`, steps return all logits."""
        device, self._graphs = graphs.device, graphs
        self.io, self._num_tokens = graphs.decoder_for(rows * target_len).io_binding(), rows * target_len
        num_best = num_candidates or 1
        # On the host, because shapes are read there; the binding does not keep it alive.
        self._num_candidates = host_value(np.array([num_best]))
        self._target_ids = device.empty((rows, target_len), "int64")
        self._lengths = device.empty((rows,), "int64") if graphs.reads_lengths else None
        self._token_ids = device.empty((rows, num_best), "int64")
        self._logits = device.empty((rows, num_candidates or graphs.spec.vocab), "float32")
        self._log_normalizer = device.empty((rows, 1), "float32")
        # Inputs that change have to be on the device: others are copied once, when they are bound.
        self.io.bind_ortvalue_input(contract.TARGET_IDS, self._target_ids)
        self.io.bind_ortvalue_input(contract.NUM_CANDIDATES, self._num_candidates)
        if self._lengths is not None:
            self.io.bind_ortvalue_input(contract.CACHE_LENGTHS, self._lengths)
        self.io.bind_ortvalue_output(contract.CANDIDATE_IDS, self._token_ids)
        self.io.bind_ortvalue_output(contract.CANDIDATE_LOGITS if num_candidates else contract.LOGITS, self._logits)
        self.io.bind_ortvalue_output(contract.LOG_NORMALIZER, self._log_normalizer)

    def run(self, target_ids: Ids, lengths: Ids) -> None:
        """Read tokens, int64 [rows, target_len] or [rows]; `lengths` is int64 [rows]."""
        self._target_ids.update_inplace(np.ascontiguousarray(target_ids))
        if self._lengths is not None:
            self._lengths.update_inplace(lengths)
        run(self._graphs.decoder_for(self._num_tokens), self.io)

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
    """Divide a batch into the cheapest encoder runs; return the rows of each run.

    The cost of a run is its number of rows times its longest source. In order of length, the cheapest division of the
    first n rows is one run that ends there, after the cheapest division of the rows before it. Runs with too many
    scores are cut; a source of more than 1,448 tokens always has its own run.
    """
    order = (-lengths).argsort(kind="stable")
    longest = lengths[order].tolist()
    # Equally long sources share a run. Lists are faster than NumPy for the few different lengths of a batch.
    firsts = [0, *(row for row in range(1, len(longest)) if longest[row] < longest[row - 1])]
    ends, costs, begins = [*firsts[1:], len(longest)], [0], [0]
    for number, end in enumerate(ends, 1):
        # Further runs are shorter, so the best begin never moves back.
        tried = range(begins[-1], number)
        cost, begin = min((costs[one] + longest[firsts[one]] * (end - firsts[one]), one) for one in tried)
        costs.append(cost + RUN_TOKENS)
        begins.append(begin)
    runs, number = [], len(ends)
    while number:
        begin = begins[number]
        runs += _cut(order[firsts[begin] : ends[number - 1]], longest[firsts[begin]])[::-1]
        number = begin
    return runs[::-1]


def has_many_scores(sources: Sources) -> bool:
    """Return whether a run has more scores than `MAX_SCORES`."""
    return len(sources) * sources.source_len**2 > MAX_SCORES


def _cut(rows: Ids, longest: int) -> list[Ids]:
    most = max(MAX_SCORES // longest**2, 1)
    return [rows[first : first + most] for first in range(0, rows.size, most)]
