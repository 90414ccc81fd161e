"""How a model is exported."""

from __future__ import annotations

from collections.abc import Iterator

from tfexport.errors import ConfigError
from tfexport.fields import Config, size_problems
from tfexport.spec import (
    CONCAT_OPSETS,
    AlignmentHeads,
    Form,
    OptimizeFor,
    Precision,
    Quantization,
    QuantizedWeights,
)


class ExportConfig(Config, subject="export"):
    """How a model becomes graphs.

    `precision` int8 and int4 are those of the weights, for ONNX Runtime on the CPU: activations and caches are fp32,
    and of `forms` only the fastest is written. `optimize_for` says how they compute; see `Quantization`.
    `forms` are those of the decoder; contrib is left out of several where ONNX Runtime's operators cannot do the model.
    `opset` is that of the encoder and of all forms but the static one, which needs 24.
    The two lengths limit what the bundle takes, at most what the model can;
    None means as much as it can. `alignment` names the cross-attention of which there is a graph of its own; `loop`
    adds one that holds the whole greedy search, by the defaults of the model. With `speculation` the contrib form
    verifies several tokens in one step.
    `seed` draws the weights of a preset.
    """

    precision: Precision | QuantizedWeights = "fp32"
    optimize_for: OptimizeFor = "latency"
    forms: tuple[Form, ...] = ("concat", "static", "contrib")
    opset: int = 18
    max_source_length: int | None = None
    max_target_length: int | None = None
    alignment: AlignmentHeads | None = None
    loop: bool = False
    speculation: bool = False
    seed: int = 0

    def _problems(self) -> list[str]:
        problems = size_problems(self, "max_source_length", "max_target_length")
        if self.opset not in CONCAT_OPSETS:
            problems.append(f"opset is {self.opset}, expected {CONCAT_OPSETS[0]} to {CONCAT_OPSETS[-1]}")
        if not self.forms or len(set(self.forms)) != len(self.forms):
            problems.append(f"forms is {', '.join(self.forms) or 'empty'}, expected concat, static, contrib, once each")
        if self.loop and self.forms == ("static",):
            problems.append("loop is made of the concat or the contrib form, and forms is static; add one of them")
        if self.speculation:
            problems += self._speculation_problems()
        if self.seed < 0:
            problems.append(f"seed is {self.seed}, expected 0 or more")
        return [*problems, *self._quantization_problems()]

    def _speculation_problems(self) -> Iterator[str]:
        if "contrib" not in self.forms:
            yield "speculation is made of the contrib form, which is not among the forms; add it"
        if self.precision in ("fp16", "bf16"):
            yield f"speculation is made of the contrib form, which is not there in {self.precision}; leave it out"

    def _quantization_problems(self) -> Iterator[str]:
        try:
            quantization = self.quantization
        except ConfigError as error:
            yield str(error)
            return
        if quantization is None and self.optimize_for == "throughput":
            yield f"optimize_for is throughput, which is for precision int8, not {self.precision}; leave it out"

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
