"""Configurations of every stage: frozen, checked on creation, read from and written to JSON."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Self

from tfexport.errors import ConfigError, raise_all, shortened

NormPlace = Literal["pre", "post"]
Norm = Literal["layernorm", "std", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
FeedForward = Literal["mlp", "glu"]
RelativeBias = Literal["none", "t5"]
Positions = Literal["table", "none"]
Precision = Literal["fp32", "fp16", "bf16"]
Form = Literal["concat", "static", "fused"]
Device = Literal["cpu", "cuda"]
Backend = Literal["auto", "eager", "ort", "trt"]
Target = Literal["tensorrt", "tensorrt-rtx"]
WeightType = Literal["int8", "int4", "fp8"]
QuantizedWeights = Literal["int8", "int4"]
OptimizeFor = Literal["latency", "throughput"]
# What bounds how exactly a stage computes: its narrow weights, else the type of its graph.
Accuracy = Precision | WeightType
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]

# Far above every model there is. What is larger is a slip or an attack: it would fill the memory before it fails.
MAX_LAYERS = MAX_HEADS = 1_000
MAX_SIZE = 10_000_000

_NO_INT4_THROUGHPUT = (
    "optimize_for is throughput, but ONNX Runtime multiplies 4 bits weight-only; use int8, or optimize for latency"
)

CONCAT_OPSETS = (18, 19, 20)
STATIC_OPSET = 24


def _type_problem(name: str, value: object, kind: Any) -> str | None:
    """Say what is wrong with `value` for the annotated type `kind`, or None."""
    for option in _options(kind):
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option) and not isinstance(value, bool):
                return None
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return (
                    None
                    if abs(value) <= sys.float_info.max
                    else f"{name} is {shortened(value)}, expected a finite number"
                )
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return None
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, tuple) and not any(_type_problem(name, v, item) for v in value):
                return None
        elif isinstance(value, option):
            return None
    return f"{name} is {shortened(value)}, expected {_spell(kind)}"


def size_problems(config: Config, *names: str, least: int = 1) -> list[str]:
    """Say which of the sizes `names` of a configuration are out of range; those that are None are not given."""
    most = {"layers": MAX_LAYERS, "num_heads": MAX_HEADS, "heads": MAX_HEADS}
    return [
        f"{name} is {shortened(value)}, expected {least} to {most.get(name, MAX_SIZE)}"
        for name in names
        if (value := getattr(config, name)) is not None and not least <= value <= most.get(name, MAX_SIZE)
    ]


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, and any other type alone."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _spell(kind: Any) -> str:
    if len(_options(kind)) > 1:
        return " or ".join(_spell(option) for option in _options(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_spell(typing.get_args(kind)[0])}"
    if kind is types.NoneType:
        return "null"
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(
        kind.__name__, "an object"
    )


def _read(cls: type, data: object, prefix: str, problems: list[str]) -> Any:
    """Build `cls` from a JSON object, appending every problem; None when there was one."""
    if not isinstance(data, dict):
        problems.append(f"{prefix.rstrip('.') or 'the file'} is {shortened(data)}, expected an object")
        return None
    hints = _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    before = len(problems)
    problems += [f"unknown key {prefix}{key[:80]}" for key in data if key not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                problems.append(f"missing key {prefix}{name}")
            continue
        value, kind = data[name], hints[name]
        options = _options(kind)
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        if nested and not (value is None and types.NoneType in options):
            values[name] = _read(typing.cast(type, nested[0]), value, f"{prefix}{name}.", problems)
            continue
        if isinstance(value, list):
            value = tuple(value)
        problem = _type_problem(prefix + name, value, kind)
        if problem:
            problems.append(problem)
        values[name] = value
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems.append(str(error))
        return None


class Config:
    """What every configuration shares: strict reading, plain writing."""

    @classmethod
    def from_dict(cls, data: object, *, subject: str = "config.json") -> Self:
        """Read a configuration strictly.

        Args:
            data: a decoded JSON object.
            subject: named at the start of the error.

        Raises:
            ConfigError: lists every unknown, missing, wrongly typed and contradictory value.
        """
        problems: list[str] = []
        config = _read(cls, data, "", problems)
        raise_all(ConfigError, subject, problems)
        return typing.cast(Self, config)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        return dataclasses.asdict(typing.cast(Any, self))

    def _check_types(self) -> list[str]:
        hints = _hints(typing.cast(Any, type(self)))
        found = (
            _type_problem(name, getattr(self, name), kind) for name, kind in hints.items() if not name.startswith("_")
        )
        return [problem for problem in found if problem]


@dataclass(frozen=True, kw_only=True)
class TokenIds(Config):
    """Ids that decoding needs to know.

    `start` is the decoder's first input. `pad` fills short rows of a batch and
    is never attended to.
    """

    pad: int
    start: int
    eos: int
    unk: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: an id is negative or no whole number.
        """
        problems = self._check_types() or [
            f"{name} is {value}, expected 0 or more"
            for name, value in dataclasses.asdict(self).items()
            if value is not None and value < 0
        ]
        raise_all(ConfigError, "tokens", problems)


@dataclass(frozen=True, kw_only=True)
class StackConfig(Config):
    """Sizes and norm placement of one side, encoder or decoder.

    `d_k` and `d_v` are the width of one head's keys and values; None means
    d_model / num_heads.
    """

    layers: int
    num_heads: int
    d_ff: int
    norm_place: NormPlace
    final_norm: bool
    d_k: int | None = None
    d_v: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every value of a wrong type or range.
        """
        problems = self._check_types() or size_problems(self, "layers", "num_heads", "d_ff", "d_k", "d_v")
        raise_all(ConfigError, "stack", problems)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The canonical transformer: free sizes, ten switches and three scalars.

    The switches are norm placement and final norm per side (in `encoder` and
    `decoder`), `embedding_norm`, `norm`, `norm_eps`, `activation`,
    `feed_forward`, `relative_bias`, `residual_scale` and `positions`.
    `decoder` is None for an encoder alone.

    `attention_scale` None means 1/sqrt(d_k). `tie_embeddings` shares one table
    between encoder and decoder, `tie_output` uses the decoder's table as the
    output projection. `max_source_length` and `max_target_length` are the rows
    of the position tables, and the limits where there is no table.
    """

    d_model: int
    source_vocab: int
    max_source_length: int
    encoder: StackConfig
    decoder: StackConfig | None
    tokens: TokenIds
    target_vocab: int | None = None
    max_target_length: int | None = None
    embedding_norm: bool = False
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "relu"
    feed_forward: FeedForward = "mlp"
    relative_bias: RelativeBias = "none"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    residual_scale: float = 1.0
    positions: Positions = "table"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    output_bias: bool = True
    tie_embeddings: bool = False
    tie_output: bool = False
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Check each value and how they fit together.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types() or [*self._size_problems(), *self._decoder_problems()]
        raise_all(ConfigError, "model", problems)

    def _size_problems(self) -> list[str]:
        problems = size_problems(
            self,
            "d_model",
            "source_vocab",
            "target_vocab",
            "max_source_length",
            "max_target_length",
            "relative_max_distance",
        )
        for side, stack in () if problems else (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack and self.d_model % stack.num_heads and not (stack.d_k and stack.d_v):
                problems.append(
                    f"{side}.num_heads is {stack.num_heads}, which does not divide d_model {self.d_model}; "
                    f"change one of them or give {side}.d_k and {side}.d_v"
                )
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, expected 0 or more and below 1")
        if self.norm_eps < 0:
            problems.append(f"norm_eps is {self.norm_eps}, expected 0 or more")
        if self.relative_bias == "t5":
            problems += size_problems(self, "relative_buckets", least=4)
        return problems

    def _decoder_problems(self) -> list[str]:
        problems: list[str] = []
        vocabularies = [("source_vocab", self.source_vocab)]
        if self.decoder is None:
            needless = [name for name in ("target_vocab", "max_target_length") if getattr(self, name) is not None]
            problems += [f"{name} is given but decoder is null; leave it out" for name in needless]
            if self.tie_embeddings or self.tie_output:
                problems.append("tie_embeddings and tie_output need a decoder; set both to false")
        else:
            missing = [name for name in ("target_vocab", "max_target_length") if getattr(self, name) is None]
            problems += [f"missing key {name}, needed with a decoder" for name in missing]
            if self.target_vocab is not None:
                vocabularies.append(("target_vocab", self.target_vocab))
                if self.tie_embeddings and self.source_vocab != self.target_vocab:
                    problems.append(
                        f"tie_embeddings needs equal vocabularies, got source_vocab {self.source_vocab} "
                        f"and target_vocab {self.target_vocab}"
                    )
        source_side = ("pad", "unk")
        for name, token in dataclasses.asdict(self.tokens).items():
            vocabulary, size = vocabularies[0] if name in source_side else vocabularies[-1]
            if token is not None and token >= size:
                problems.append(f"tokens.{name} is {token}, expected below {vocabulary} {size}")
        return problems

    def num_heads(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the number of attention heads of one side."""
        return self._stack(side).num_heads

    def d_k(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the width of one head's queries and keys on one side."""
        stack = self._stack(side)
        return stack.d_k or self.d_model // stack.num_heads

    def d_v(self, side: Literal["encoder", "decoder"]) -> int:
        """Return the width of one head's values on one side."""
        stack = self._stack(side)
        return stack.d_v or self.d_model // stack.num_heads

    def _stack(self, side: Literal["encoder", "decoder"]) -> StackConfig:
        stack = self.encoder if side == "encoder" else self.decoder
        if stack is None:
            raise ConfigError("model: this is an encoder alone and has no decoder")
        return stack


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Config):
    """How a foreign checkpoint becomes a model directory.

    `layout` is auto, the name of a built-in layout or a layout file. `heads` is
    what no shape tells. `settings` are KEY=VALUE, switches and tokens that take
    the place of the layout's. `builtin` lets auto propose the built-in layouts;
    `accept_unverified` takes what it proposes without a golden.
    """

    layout: str = "auto"
    heads: int | None = None
    settings: tuple[str, ...] = ()
    builtin: bool = True
    accept_unverified: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types() or size_problems(self, "heads")
        if not problems and not self.builtin and self.layout != "auto":
            problems.append(f"builtin is false, but layout is {self.layout}; leave one of them out")
        raise_all(ConfigError, "import", problems)


@dataclass(frozen=True, kw_only=True)
class Quantization(Config):
    """How a bundle stores its matrices narrower than it computes: for ONNX Runtime on the CPU.

    `latency` rounds the activations of each row by themselves, so that a text does not depend on its batch;
    `throughput` rounds those of a batch together, which is faster where batches are large and is there in 8 bits only.
    """

    weights: QuantizedWeights
    optimize_for: OptimizeFor = "latency"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types()
        if not problems and self.weights == "int4" and self.optimize_for == "throughput":
            problems.append(_NO_INT4_THROUGHPUT)
        raise_all(ConfigError, "quantization", problems)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """How a model becomes graphs.

    `precision` int8 and int4 are those of the weights, for ONNX Runtime on the CPU: activations and caches are fp32,
    and of `forms` only the fastest is written. `optimize_for` says how they compute; see `Quantization`.
    `forms` are those of the decoder; fused is left out of several where ONNX Runtime's operators cannot do the model.
    `opset` is that of the encoder and of all forms but the static one, which needs 24.
    The two lengths limit what the bundle takes, at most what the model can;
    None means as much as it can. `seed` draws the weights of a preset.
    """

    precision: Precision | QuantizedWeights = "fp32"
    optimize_for: OptimizeFor = "latency"
    forms: tuple[Form, ...] = ("concat", "static", "fused")
    opset: int = 18
    max_source_length: int | None = None
    max_target_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types()
        if not problems:
            if self.opset not in CONCAT_OPSETS:
                problems.append(f"opset is {self.opset}, expected {CONCAT_OPSETS[0]} to {CONCAT_OPSETS[-1]}")
            if not self.forms or len(set(self.forms)) != len(self.forms):
                problems.append(
                    f"forms is {', '.join(self.forms) or 'empty'}, expected some of concat, static and fused, once each"
                )
            problems += size_problems(self, "max_source_length", "max_target_length")
            if self.seed < 0:
                problems.append(f"seed is {self.seed}, expected 0 or more")
            problems += self._quantization_problems()
        raise_all(ConfigError, "export", problems)

    def _quantization_problems(self) -> list[str]:
        if self.optimize_for == "latency" or self.precision == "int8":
            return []
        if self.precision == "int4":
            return [_NO_INT4_THROUGHPUT]
        return [f"optimize_for is throughput, which is for precision int8, not {self.precision}; leave it out"]

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are stored; None where they have the type of the graph."""
        if self.precision == "int8" or self.precision == "int4":
            return Quantization(weights=self.precision, optimize_for=self.optimize_for)
        return None

    @property
    def graph_precision(self) -> Precision:
        """Of activations and caches."""
        return "fp32" if self.precision == "int8" or self.precision == "int4" else self.precision


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """How the graphs of a bundle become TensorRT engines.

    None and empty mean: the target that fits this machine, the static form where
    the target has a layer for it, the bundle's own precision and lengths, the
    library's own default. `max_batch` counts hypotheses: a source takes num_beams
    of them. `weights` stores the matrices of linear maps narrower than the graph
    computes. The three shapes override the profile, in the spelling of trtexec:
    "source_ids:4x64,target_ids:4x1". `compute_capabilities` are written "8.6".
    """

    target: Target | None = None
    form: Form | None = None
    precision: Precision | None = None
    weights: WeightType | None = None
    max_batch: int = 32
    max_source_length: int | None = None
    max_target_length: int | None = None
    min_shapes: str = ""
    opt_shapes: str = ""
    max_shapes: str = ""
    workspace_mib: int | None = None
    builder_optimization_level: int | None = None
    timing_cache: str | None = None
    version_compatible: bool = False
    hardware_compatibility: HardwareCompatibility = "none"
    compute_capabilities: tuple[str, ...] = ()
    strip_weights: bool = False
    refit: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types()
        if not problems:
            problems += size_problems(self, "max_batch", "max_source_length", "max_target_length", "workspace_mib")
            if self.form == "fused":
                problems.append("form is fused, which is for ONNX Runtime alone; use static or concat")
            level = self.builder_optimization_level
            if level is not None and not 0 <= level <= 5:
                problems.append(f"builder_optimization_level is {level}, expected 0 to 5")
            problems += [
                f"compute_capabilities has {shortened(value)}, expected major.minor such as 8.6"
                for value in self.compute_capabilities
                if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", value)
            ]
        raise_all(ConfigError, "engine", problems)


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Config):
    """The most that engines take: the largest shapes of their profiles.

    Attributes:
        max_batch: sources, and hypotheses of all sources together.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target; in the static form the capacity of the caches.
        max_candidates: best tokens a step can return.
    """

    max_batch: int
    max_source_length: int
    max_target_length: int
    max_candidates: int

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: lists every problem.
        """
        names = [field.name for field in dataclasses.fields(self)]
        problems = self._check_types() or size_problems(self, *names[:2]) + size_problems(self, *names[2:], least=0)
        raise_all(ConfigError, "limits", problems)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Config):
    """How text is generated; names, meaning and defaults are those of Hugging Face `generate`.

    `max_new_tokens` None means as many as the model takes. Beams and samples
    exclude one another. With `do_sample`, `num_return_sequences` samples are
    drawn independently; `seed`, the place of the text in the call and the number
    of the sample determine each.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    num_return_sequences: int = 1
    forced_bos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each value and how they fit together.

        Raises:
            ConfigError: lists every problem.
        """
        problems = self._check_types() or [*self._range_problems(), *self._contradictions()]
        raise_all(ConfigError, "decoding", problems)

    def _range_problems(self) -> list[str]:
        lowest = {
            "max_new_tokens": 1,
            "min_new_tokens": 0,
            "no_repeat_ngram_size": 0,
            "top_k": 0,
            "forced_bos_token_id": 0,
            "seed": 0,
        }
        between = {
            "num_beams": (1, 64),
            "num_return_sequences": (1, 64),
            "length_penalty": (-10, 10),
            "repetition_penalty": (0.01, 100),
            "temperature": (0.01, 100),
        }
        problems = [
            f"{name} is {value}, expected {low} or more"
            for name, low in lowest.items()
            if (value := getattr(self, name)) is not None and value < low
        ]
        problems += [
            f"{name} is {value}, expected {low} to {high}"
            for name, (low, high) in between.items()
            if not low <= (value := getattr(self, name)) <= high
        ]
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}, expected above 0 and up to 1")
        problems += [f"suppress_tokens has {token}, expected 0 or more" for token in self.suppress_tokens if token < 0]
        return problems

    def _contradictions(self) -> list[str]:
        problems = [
            f"{name} is {getattr(self, name)} but do_sample is false; set do_sample to true or leave {name} out"
            for name in ("temperature", "top_k", "top_p")
            if not self.do_sample and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        problems += [
            f"{name} is {getattr(self, name)!r} but num_beams is 1; set num_beams to 2 or more or leave {name} out"
            for name in ("length_penalty", "early_stopping")
            if self.num_beams == 1 and getattr(self, name) != getattr(DecodeConfig, name)
        ]
        if self.do_sample and self.num_beams > 1:
            problems.append(f"do_sample with num_beams {self.num_beams}; set num_beams to 1 or do_sample to false")
        elif not self.do_sample and self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams}; "
                f"set num_beams to {self.num_return_sequences} or do_sample to true"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problems.append(
                f"min_new_tokens is {self.min_new_tokens} but max_new_tokens is {self.max_new_tokens}; "
                "lower the one or raise the other"
            )
        if self.forced_bos_token_id is not None:
            if self.forced_bos_token_id in self.suppress_tokens:
                problems.append(f"forced_bos_token_id {self.forced_bos_token_id} is in suppress_tokens; take it out")
            if self.max_new_tokens == 1:
                problems.append("forced_bos_token_id takes the only new token; set max_new_tokens to 2 or more")
        return problems
