"""The graph contract: names, dtypes and dimensions of every input and output.

Every dimension has one name in all graphs. `batch` is the number of sources and `rows` the number of hypotheses:
rows = batch · beams, and the beams of one source are adjacent. `num_candidates` is the number of best tokens that a
step returns.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar, cast

from tfexport.config import MAX_HEADS, MAX_LAYERS, Config, Ge, Heads, Le, Match, Size, SizeOrZero, TokenId
from tfexport.errors import ConfigError, raise_all, shortened
from tfexport.precision import FLOAT, ITEM_BYTES, CalibrationMethod, DType, Precision, Quantized, WeightType
from tfexport.sources import BATCH, FeatureSource, ImageSource, SourceKind, TokenSource

Variant = Literal["concat", "static", "contrib"]
DeviceKind = Literal["cpu", "cuda"]
DEVICE = Match(r"cpu|cuda(:[0-9]{1,3})?", "'cpu', 'cuda' or one of several GPUs, such as 'cuda:1'")
Device = Annotated[str, DEVICE]
OptimizeFor = Literal["latency", "throughput"]
Head = Literal["none", "token", "sequence"]
Pooling = Literal["mean", "cls", "max"]
Labels = tuple[Annotated[str, Match(r"[^\x00-\x1f\x7f]{1,200}", "1 to 200 characters of one line")], ...]

CONCAT_OPSETS = (18, 19, 20)
STATIC_OPSET = 24

WEIGHTS = "weights.safetensors"
QUANTIZED_WEIGHTS = "weights.bin"  # plain bytes, because safetensors has no 4-bit type
ENCODER = "encoder"
ENCODER_CONTRIB = "encoder_contrib"
DECODER: dict[Variant, str] = {"concat": "decoder", "static": "decoder_static", "contrib": "decoder_contrib"}

SOURCE_MASK = "source_mask"  # of the positions that the encoder returns
HIDDEN_STATES = "hidden_states"
TARGET_IDS = "target_ids"
CACHE_LENGTHS = "cache_lengths"
POSITIONS = "positions"
LAST_POSITION = "last_position"
TOTAL_LENGTH = "total_length"
NUM_CANDIDATES = "num_candidates"
WITHOUT_SCORES = "without_scores"  # optional input of some contrib decoders
MAX_WITHOUT_SCORES = 16  # candidates of such a step
LOGITS_TO_KEEP = "logits_to_keep"
LOGITS = "logits"
CANDIDATE_IDS = "candidate_ids"
CANDIDATE_LOGITS = "candidate_logits"
LOG_NORMALIZER = "log_normalizer"
ALIGNMENT = "alignment"  # both the graph and its output
REORDER = "reorder"
SHORTLIST = "shortlist"
CACHE = "cache"
ORDER = "order"
REORDERED = "reordered"
SHORTLIST_IDS = "shortlist_ids"
# Rows of the output projection, and its bias: of all rows, or with -inf for tokens that a row may not generate.
SHORTLIST_WEIGHTS = "shortlist_weights"
SHORTLIST_BIAS = "shortlist_bias"

# First axis of the outputs of a decoder with speculation; the positions of one row are adjacent.
ROWS_TO_KEEP = f"rows * {LOGITS_TO_KEEP}"
SHORTLIST_LEN = "shortlist_len"

Dim = str | int
D = TypeVar("D", str, int, Dim)


class TokenIds(Config, subject="tokens"):
    """Special token ids; `start` is the first input of the decoder."""

    pad: TokenId
    start: TokenId
    eos: TokenId
    unk: TokenId | None = None


class SpeechTokens(Config, subject="speech"):
    """Ids that begin the targets of a speech model such as Whisper.

    After the start token come the language, the task and `no_timestamps`, each as far as the model has it. All ids
    above `no_timestamps` are timestamps.
    """

    languages: tuple[str, ...] = ()  # such as "de"
    language_ids: tuple[TokenId, ...] = ()
    transcribe: TokenId | None = None
    translate: TokenId | None = None
    no_timestamps: TokenId | None = None

    def _problems(self) -> Iterator[str]:
        if len(set(self.languages)) != len(self.languages) or len(self.languages) != len(self.language_ids):
            yield f"{len(self.languages)} languages have {len(self.language_ids)} ids, expected names with an id each"

    @property
    def ids(self) -> tuple[int, ...]:
        """All of the ids."""
        single = (self.transcribe, self.translate, self.no_timestamps)
        return (*self.language_ids, *(token for token in single if token is not None))

    @property
    def first_timestamp(self) -> int | None:
        """Id of the time 0; None if the model has no timestamps."""
        return None if self.no_timestamps is None else self.no_timestamps + 1


class Quantization(Config, subject="quantization"):
    """How a bundle stores its matrices in fewer bits.

    Without `calibration`, it is for ONNX Runtime on the CPU. `latency` selects operators that are fast for the few rows
    of a decode step. `throughput` selects operators that are fast for large batches, and needs int8. Activations are
    rounded per row, so a text does not depend on its batch.

    With `calibration`, it is for TensorRT. Activations have the type of the weights, int8 or fp8, and constant scales,
    which this method chose from the decodes of `calibration_texts` texts.
    """

    weights: WeightType
    optimize_for: OptimizeFor = "latency"
    calibration: CalibrationMethod | None = None
    calibration_texts: SizeOrZero = 0

    def _problems(self) -> Iterator[str]:
        if self.calibration is not None and self.optimize_for == "throughput":
            yield f"optimize_for is throughput, which needs int8, not {self.precision}; omit it"
        elif self.weights == "int4" and self.optimize_for == "throughput":
            remedy = "use int8, or optimize for latency"
            yield f"optimize_for is throughput, but ONNX Runtime multiplies 4 bits weight-only; {remedy}"
        if self.weights != "int8" and (self.weights == "fp8") != (self.calibration is not None):
            yield f"weights is {self.weights}, calibration {self.calibration}, expected one with fp8, none with int4"

    @property
    def precision(self) -> Quantized:
        """The precision of the export."""
        return "w8a8" if self.calibration and self.weights == "int8" else self.weights


def device_parts(device: Device) -> tuple[DeviceKind, int]:
    """Return the kind and number of a device; "cuda" is the first visible GPU."""
    kind, _, number = device.partition(":")
    return cast(DeviceKind, kind), int(number or 0)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph; a dimension is a name or a number."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name[:80]} {self.dtype} [{', '.join(str(dim)[:40] for dim in self.shape)}]"


@dataclass(frozen=True)
class CacheKind:
    """What each decoder layer stores for every row: keys and values, or a state."""

    widths: Mapping[str, int]  # by part: "key" and "value", or "state"
    dtype: DType
    layers: int
    heads: int
    grows: bool = True  # with the number of tokens; a state has a fixed size

    def names(self, prefix: str) -> list[str]:
        """Return the names of all tensors: `prefix_key.0`, `prefix_value.0` and so on."""
        return [f"{prefix}_{part}.{layer}" for layer in range(self.layers) for part in self.widths]

    def shapes(self, rows: D, length: D) -> Sequence[tuple[D | int, ...]]:
        """Return the shapes of all tensors for some rows and tokens."""
        if self.grows:
            return [(rows, self.heads, length, width) for width in self.widths.values()] * self.layers
        return [(rows, width) for width in self.widths.values()] * self.layers

    def num_bytes(self, rows: int, length: int) -> list[int]:
        """Return the size of every tensor."""
        return [math.prod(shape) * ITEM_BYTES[self.dtype] for shape in self.shapes(rows, length)]

    def tensors(self, prefix: str, rows: Dim, length: Dim) -> list[TensorSpec]:
        """Return the specifications of all tensors."""
        named = zip(self.names(prefix), self.shapes(rows, length), strict=True)
        return [TensorSpec(name, self.dtype, shape) for name, shape in named]


class ModelSpec(Config, subject="spec"):
    """Sizes and token ids that every stage after the export needs.

    For an encoder-only model `vocab`, `layers`, `heads`, `head_dim`, `value_dim` and `max_target_length` are 0.
    A model reads token ids of `source_vocab`, `features` or an `image`; the other two are 0 or None. The encoder
    returns up to `max_source_length` positions: tokens, or what is left of frames or pixels after convolutions.

    If `kv_heads` is None, it equals `heads`. A decoder with recurrences instead of self-attention stores a state of
    `state_width` in each layer; 0 for keys and values.

    `pooling` joins the vectors of the tokens of an encoder-only model. `head` returns a logit for each of the `labels`,
    of every token or of the pooled vector. `speech` has the tokens of the prompts of speech models.
    """

    d_model: Size
    max_source_length: Size
    tokens: TokenIds
    precision: Precision
    source_vocab: SizeOrZero = 0
    features: FeatureSource | None = None
    image: ImageSource | None = None
    vocab: SizeOrZero = 0
    layers: Annotated[int, Ge(0), Le(MAX_LAYERS)] = 0
    heads: Annotated[int, Ge(0), Le(MAX_HEADS)] = 0
    head_dim: SizeOrZero = 0
    value_dim: SizeOrZero = 0
    max_target_length: SizeOrZero = 0
    kv_heads: Heads | None = None
    state_width: SizeOrZero = 0
    pooling: Pooling = "mean"
    head: Head = "none"
    labels: Labels = ()
    speech: SpeechTokens | None = None

    def _problems(self) -> Iterator[str]:
        if self.speech and max(self.speech.ids, default=-1) >= self.vocab:
            yield f"speech has the id {max(self.speech.ids)}, expected below vocab {self.vocab}"
        given = [name for name in ("source_vocab", "features", "image") if getattr(self, name)]
        if len(given) != 1:
            yield f"source_vocab, features and image: {len(given)} of them are given, expected one"
            return
        longest = self.source.fits(self.max_source_length)
        if longest > self.max_source_length:
            yield f"max_source_length is {self.max_source_length}, but every source has {longest} positions; raise it"
        # Start and end belong to the target's vocabulary, the others to the source's if it has one.
        source, target = ("source_vocab", self.source_vocab), ("vocab", self.vocab)
        for name, token in dataclasses.asdict(self.tokens).items():
            is_target = self.has_decoder and (name in ("start", "eos") or not self.source_vocab)
            vocabulary, size = target if is_target else source
            if token is not None and token >= size > 0:
                yield f"tokens.{name} is {shortened(token)}, expected below {vocabulary} {shortened(size)}"

    @functools.cached_property
    def source(self) -> SourceKind:
        """What the encoder reads."""
        special = self.tokens.pad, self.tokens.eos, self.tokens.start
        return self.features or self.image or TokenSource(self.source_vocab, self.tokens.pad, special)

    @property
    def has_decoder(self) -> bool:
        """Whether the model generates text."""
        return self.layers > 0

    @property
    def cache_heads(self) -> int:
        """Number of key and value heads; less than `heads` if heads share them."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @functools.cached_property
    def cross(self) -> CacheKind:
        """Keys and values of cross-attention."""
        widths = {"key": self.head_dim, "value": self.value_dim}
        return CacheKind(widths, FLOAT[self.precision], self.layers, self.cache_heads)

    @property
    def cache(self) -> CacheKind:
        """What the decoder stores of the tokens that it has read."""
        if not self.state_width:
            return self.cross
        # Half precision would lose terms that are small next to the state.
        return CacheKind({"state": self.state_width}, "float32", self.layers, 1, grows=False)


class AlignmentHeads(Config, subject="alignment"):
    """Decoder layer and heads whose mean cross-attention serves as alignment.

    `layer` counts from 0; negative numbers count from the end. `heads` count from 0; empty means all.
    """

    layer: int
    heads: tuple[int, ...] = ()

    def _problems(self) -> Iterator[str]:
        if min(self.heads, default=0) < 0 or len(set(self.heads)) != len(self.heads):
            yield f"heads is {', '.join(map(str, self.heads))}, expected numbers from 0, once each"

    def within(self, spec: ModelSpec) -> Self:
        """Resolve a negative layer and empty heads, or raise `ConfigError`."""
        problems = []
        if not spec.has_decoder:
            problems.append("an encoder-only model has no attention to a source; leave alignment out")
        elif not -spec.layers <= self.layer < spec.layers:
            remedy = f"give 0 to {spec.layers - 1}, or -1 for the last"
            problems.append(f"layer is {self.layer}, but the decoder has {spec.layers}; {remedy}")
        if spec.has_decoder and (beyond := [head for head in self.heads if head >= spec.heads]):
            remedy = f"give 0 to {spec.heads - 1}, or none for all"
            problems.append(f"heads has {beyond[0]}, but a layer has {spec.heads}; {remedy}")
        raise_all(ConfigError, "alignment", problems)
        heads = self.heads or tuple(range(spec.heads))
        return dataclasses.replace(self, layer=self.layer % spec.layers, heads=heads)


@dataclass(frozen=True)
class GraphSpec:
    """Inputs and outputs of one graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class GraphEntry(Config, subject="graph"):
    """One graph of a bundle: its file, ONNX opset, inputs and outputs in order."""

    file: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, file: str, opset: int, spec: GraphSpec) -> Self:
        """Create the entry of a graph file."""
        return cls(file=file, opset=opset, inputs=spec.inputs, outputs=spec.outputs)

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs."""
        return GraphSpec(self.inputs, self.outputs)


def encoder_graph(spec: ModelSpec) -> GraphSpec:
    """Return the contract of `encoder.onnx`."""
    source: tuple[Dim, ...] = (BATCH, spec.source.source_len)
    inputs = tuple(TensorSpec(name, *kind) for name, kind in spec.source.inputs.items())
    if spec.has_decoder:
        return GraphSpec(inputs, tuple(spec.cross.tensors("cross", *source)))
    outputs = [TensorSpec(HIDDEN_STATES, "float32", (*source, spec.d_model))]
    if spec.head != "none":
        positions = source if spec.head == "token" else source[:1]
        outputs.append(TensorSpec(LOGITS, "float32", (*positions, len(spec.labels))))
    return GraphSpec(inputs, tuple(outputs))


def decoder_graph(
    spec: ModelSpec, variant: Variant, *, speculation: bool = False, shortlist: bool = False
) -> GraphSpec:
    """Return the contract of a decoder variant, as in docs/reference/graphs.md.

    The contrib variant needs past_len 0 in every row, or target_len 1, or one row. With `speculation` (contrib only),
    `logits_to_keep` is the number of last positions whose logits are returned. With `shortlist` (contrib only), logits
    are those of `shortlist_ids`. If layers store a state, a step reads one token of each row, and all variants have the
    same inputs.

    A contrib decoder may have the optional input `without_scores`, which is not listed. If it is true, `logits` has no
    rows and `log_normalizer` is 1 for rows that needed all logits and 0 for others.
    """
    lengths = [TensorSpec(CACHE_LENGTHS, "int64", ("rows",))]
    positions = {
        "concat": [],
        "static": lengths,
        "contrib": [
            TensorSpec(POSITIONS, "int64", ("rows", "target_len")),
            TensorSpec(LAST_POSITION, "int32", ("rows",)),
            TensorSpec(TOTAL_LENGTH, "int32", (1,)),
        ],
    }
    grows = spec.cache.grows
    inputs = [
        TensorSpec(TARGET_IDS, "int64", ("rows", "target_len" if grows else 1)),
        TensorSpec(SOURCE_MASK, "bool", ("batch", "source_len")),
        *spec.cross.tensors("cross", "batch", "source_len"),
        *spec.cache.tensors("past", "rows", "past_len" if variant == "concat" else "capacity"),
        *(positions[variant] if grows else lengths),
        *([TensorSpec(LOGITS_TO_KEEP, "int64", (1,))] if speculation else []),
        *(shortlist_tensors(spec, "rows") if shortlist else []),
        TensorSpec(NUM_CANDIDATES, "int64", (1,)),
    ]
    rows = ROWS_TO_KEEP if speculation else "rows"
    outputs = [
        TensorSpec(LOGITS, "float32", (rows, SHORTLIST_LEN if shortlist else spec.vocab)),
        TensorSpec(CANDIDATE_IDS, "int64", (rows, "num_candidates")),
        TensorSpec(CANDIDATE_LOGITS, "float32", (rows, "num_candidates")),
        TensorSpec(LOG_NORMALIZER, "float32", (rows, 1)),
        *spec.cache.tensors("present", "rows", "past_len + target_len" if variant == "concat" else "capacity"),
    ]
    return GraphSpec(tuple(inputs), tuple(outputs))


def alignment_graph(spec: ModelSpec) -> GraphSpec:
    """Return the contract of `alignment.onnx`: one row of weights per target token."""
    # `target_ids` start with the start token and lack the last token.
    inputs = (*encoder_graph(spec).inputs, TensorSpec(TARGET_IDS, "int64", ("batch", "target_len")))
    return GraphSpec(inputs, (TensorSpec(ALIGNMENT, "float32", ("batch", "target_len", spec.source.source_len)),))


def reorder_spec(precision: Precision) -> GraphSpec:
    """Return the contract of the graph that copies rows of a cache [rows, width]."""
    dtype = FLOAT[precision]
    inputs = (TensorSpec(CACHE, dtype, ("rows", "width")), TensorSpec(ORDER, "int64", ("new_rows",)))
    return GraphSpec(inputs, (TensorSpec(REORDERED, dtype, ("new_rows", "width")),))


def shortlist_graph(spec: ModelSpec) -> GraphSpec:
    """Return the contract of `shortlist.onnx`."""
    ids, *outputs = shortlist_tensors(spec)
    return GraphSpec((ids,), tuple(outputs))


def shortlist_tensors(spec: ModelSpec, *bias: Dim) -> tuple[TensorSpec, ...]:
    """Return the tensors of a shortlist; `bias` are more dimensions of its bias."""
    return (
        TensorSpec(SHORTLIST_IDS, "int64", (SHORTLIST_LEN,)),
        TensorSpec(SHORTLIST_WEIGHTS, "float32", (SHORTLIST_LEN, spec.d_model)),
        TensorSpec(SHORTLIST_BIAS, "float32", (*bias, SHORTLIST_LEN)),
    )


def has_speculation(decoder: GraphSpec) -> bool:
    """Return whether a decoder can return the logits of several last positions."""
    return any(tensor.name == LOGITS_TO_KEEP for tensor in decoder.inputs)


def has_shortlist(decoder: GraphSpec) -> bool:
    """Return whether a decoder computes the logits of a shortlist."""
    return any(tensor.name == SHORTLIST_IDS for tensor in decoder.inputs)


def graph_contract(spec: ModelSpec, name: str, found: GraphSpec | None = None) -> GraphSpec:
    """Return the contract of a graph by name, with the options that `found` has."""
    for variant, decoder in DECODER.items():
        if name == decoder:
            if found is None or variant != "contrib":
                return decoder_graph(spec, variant)
            return decoder_graph(spec, variant, speculation=has_speculation(found), shortlist=has_shortlist(found))
    if name == SHORTLIST:
        return shortlist_graph(spec)
    if name == REORDER:
        return reorder_spec(spec.precision)
    return alignment_graph(spec) if name == ALIGNMENT else encoder_graph(spec)


def contract_problems(found: GraphSpec, expected: GraphSpec) -> list[str]:
    """List the differences between the inputs and outputs of a graph and a contract."""
    problems: list[str] = []
    sides = (("input", found.inputs, expected.inputs), ("output", found.outputs, expected.outputs))
    for kind, actual, wanted in sides:
        extra, missing = set(actual) - set(wanted), set(wanted) - set(actual)
        problems += [f"{kind} {tensor} is not in the contract" for tensor in actual if tensor in extra]
        problems += [f"{kind} {tensor} is missing" for tensor in wanted if tensor in missing]
        if not problems and actual != wanted:
            problems.append(f"{kind}s are out of order, or given twice")
    return problems
