"""Configuration of the export."""

from collections.abc import Iterator
from typing import Annotated

from tfexport.config import Config, Count, Ge, Help, Le, Size
from tfexport.contract import CONCAT_OPSETS, AlignmentHeads, Form, OptimizeFor, Quantization
from tfexport.errors import ConfigError
from tfexport.precision import Precision, QuantizedWeights


class ExportConfig(Config, subject="export"):
    """How a model is exported to graphs.

    If `precision` is int8 or int4, it is the precision of the weights, for ONNX Runtime on the CPU: activations and
    caches are fp32, and only the fastest of `forms` is written. `optimize_for` is explained in `Quantization`.

    Variants in `forms` that do not support the model are skipped, such as contrib if ONNX Runtime's operators cannot
    compute it. The static variant always has opset 24. The two lengths limit the bundle's input and output, at most to
    the model's limits.

    `alignment` is the cross-attention that gets its own graph. With `speculation`, the contrib variant verifies several
    tokens in one step.
    """

    precision: Annotated[
        Precision | QuantizedWeights, Help("Of the weights; int8 and int4 are for ONNX Runtime on the CPU.")
    ] = "fp32"
    optimize_for: Annotated[
        OptimizeFor, Help("What int8 is fast at: up to some 16 texts at once, or large batches.")
    ] = "latency"
    forms: Annotated[
        tuple[Form, ...],
        Help(
            "Of the decoder: concat is portable, static is for engines and GPUs, contrib is for ONNX Runtime on the "
            "CPU."
        ),
    ] = ("concat", "static", "contrib")
    opset: Annotated[
        int, Ge(CONCAT_OPSETS[0]), Le(CONCAT_OPSETS[-1]), Help("Of the encoder and all forms but static.")
    ] = 18
    max_source_length: Annotated[Size | None, Help("Most source tokens; the model's limit when not given.")] = None
    max_target_length: Annotated[Size | None, Help("Most target tokens; the model's limit when not given.")] = None
    alignment: Annotated[
        AlignmentHeads | None,
        Help(
            "Write cross-attention as alignment too: of this decoder layer, from 0 or -1 for the last, the mean of "
            "these heads, or of all when none is named."
        ),
    ] = None
    speculation: Annotated[
        bool, Help("Let one step verify several tokens of a single text that copies or repeats.")
    ] = False
    seed: Annotated[Count, Help("Of a preset's random weights.")] = 0

    def _problems(self) -> list[str]:
        problems = []
        if not self.forms or len(set(self.forms)) != len(self.forms):
            problems.append(f"forms is {', '.join(self.forms) or 'empty'}, expected concat, static, contrib, once each")
        if self.speculation:
            problems += self._speculation_problems()
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
        """How the weights are stored; None if they have the type of the graph."""
        if self.precision == "int8" or self.precision == "int4":
            return Quantization(weights=self.precision, optimize_for=self.optimize_for)
        return None

    @property
    def graph_precision(self) -> Precision:
        """Precision of activations and caches."""
        return "fp32" if self.precision == "int8" or self.precision == "int4" else self.precision
