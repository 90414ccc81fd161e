"""Configuration of the export."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tfexport.config import Config, Count, Ge, Help, Le, Size
from tfexport.contract import CONCAT_OPSETS, AlignmentHeads, OptimizeFor, Quantization, Variant
from tfexport.errors import ConfigError
from tfexport.precision import CALIBRATED, CalibratedPrecision, CalibrationMethod, Precision, QuantizedWeights


class ExportConfig(Config, subject="export", former={"forms": "variants"}):
    """How a model is exported to graphs.

    If `precision` is int8 or int4, it is the precision of the weights, for ONNX Runtime on the CPU: activations and
    caches are fp32, and only the fastest of `variants` is written. `optimize_for` is explained in `Quantization`.

    If it is w8a8 or fp8, linear layers multiply weights and activations in int8 or float8 (E4M3), for TensorRT; the
    graphs are fp16. `calibration_method` chooses the range of each activation from texts.

    Of the decoder `variants`, those that do not support the model are skipped, such as contrib if ONNX
    Runtime's operators cannot compute it. The static variant always has opset 24. The two lengths limit the bundle's
    input and output, at most to the model's limits.

    `alignment` is the cross-attention that gets its own graph. With `speculation`, the contrib variant verifies several
    tokens in one step.

    `shortlist` is a file of Marian with the target tokens that each source token allows. Then only the contrib variant
    is written, and each text may only have the tokens of its shortlist.
    """

    precision: Annotated[
        Precision | QuantizedWeights | CalibratedPrecision,
        Help(
            "Precision of the weights; int8 and int4 are for ONNX Runtime on the CPU, w8a8 (int8) and fp8 for TensorRT "
            "with calibrated activations."
        ),
    ] = "fp32"
    optimize_for: Annotated[
        OptimizeFor, Help("Make int8 fast for up to about 16 texts at a time, or for large batches.")
    ] = "latency"
    calibration_method: Annotated[
        CalibrationMethod, Help("How w8a8 and fp8 choose the range of activations from the calibration texts.")
    ] = "minmax"
    variants: Annotated[
        tuple[Variant, ...],
        Help("Decoder variants: concat is portable, static for engines and GPUs, contrib for ONNX Runtime on the CPU."),
    ] = ("concat", "static", "contrib")
    opset: Annotated[
        int, Ge(CONCAT_OPSETS[0]), Le(CONCAT_OPSETS[-1]), Help("ONNX opset of the encoder and all variants but static.")
    ] = 18
    max_source_length: Annotated[Size | None, Help("Maximum number of source tokens; the model's if not given.")] = None
    max_target_length: Annotated[Size | None, Help("Maximum number of target tokens; the model's if not given.")] = None
    alignment: Annotated[
        AlignmentHeads | None,
        Help(
            "Export the cross-attention of this decoder layer, from 0 or -1 for the last, as alignment: the mean of "
            "these heads, or of all heads if none is given."
        ),
    ] = None
    speculation: Annotated[
        bool, Help("Let one step verify several tokens, for single texts that copy from the source or repeat.")
    ] = False
    shortlist: Annotated[
        Path | None,
        Help(
            "Lexical shortlist of Marian that limits the tokens of each text, such as lex.50.50.s2t.bin or lex.s2t.gz; "
            "only for ONNX Runtime on the CPU, in fp32, int8 or int4."
        ),
    ] = None
    seed: Annotated[Count, Help("Seed of a preset's random weights.")] = 0

    def _problems(self) -> list[str]:
        problems = []
        if not self.variants or len(set(self.variants)) != len(self.variants):
            found = ", ".join(self.variants) or "empty"
            problems.append(f"variants is {found}, expected at least one of concat, static, contrib, each at most once")
        if self.speculation and "contrib" not in self.variants:
            problems.append("speculation needs the contrib variant; add contrib to the variants")
        if self.speculation and self.graph_precision != "fp32":
            problems.append(f"speculation needs the contrib variant, which does not exist in {self.precision}; omit it")
        if self.shortlist is not None:
            problems += self._shortlist_problems()
        if not self.is_calibrated and self.calibration_method != "minmax":
            problem = f"calibration_method is {self.calibration_method}, which needs w8a8 or fp8"
            problems.append(f"{problem}, not {self.precision}; omit it")
        try:
            if self.quantization is None and self.optimize_for == "throughput":
                problems.append(f"optimize_for is throughput, which needs int8, not {self.precision}; omit it")
        except ConfigError as error:
            problems.append(str(error))
        return problems

    def _shortlist_problems(self) -> Iterator[str]:
        if "contrib" not in self.variants:
            yield "shortlist needs the contrib variant; add contrib to the variants"
        if self.graph_precision != "fp32":
            yield f"shortlist needs the contrib variant, which does not exist in {self.precision}; use fp32 or int8"
        if self.speculation:
            yield "shortlist and speculation exclude each other; omit one of them"

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are stored; None if they have the type of the graph."""
        if self.precision == "int8" or self.precision == "int4":
            return Quantization(weights=self.precision, optimize_for=self.optimize_for)
        if self.precision == "w8a8" or self.precision == "fp8":
            weights, method = CALIBRATED[self.precision], self.calibration_method
            return Quantization(weights=weights, optimize_for=self.optimize_for, calibration=method)
        return None

    @property
    def is_calibrated(self) -> bool:
        """Whether activations are quantized with scales from texts."""
        return self.precision in CALIBRATED

    @property
    def graph_precision(self) -> Precision:
        """Precision of activations and caches."""
        if self.precision == "int8" or self.precision == "int4":
            return "fp32"
        return "fp16" if self.precision == "w8a8" or self.precision == "fp8" else self.precision
