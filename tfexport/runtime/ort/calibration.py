"""Choose ranges of tensors with the calibrators of ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector

from tfexport.precision import CalibrationMethod

Key = TypeVar("Key", bound=Hashable)

# Share of the numbers within the range, in percent.
_PERCENTILE = 99.99
# Of a histogram, and of the 8-bit numbers that an entropy is computed for.
_BINS, _QUANTIZED_BINS = 1024, 255


class Ranges:
    """The largest magnitude of each tensor, or less if the method cuts off outliers."""

    def __init__(self, method: CalibrationMethod) -> None:
        self._largest: dict[Any, float] = {}
        self._collector = None
        if method != "minmax":
            self._collector = HistogramCollector(
                method=method,
                symmetric=True,
                num_bins=_BINS,
                num_quantized_bins=_QUANTIZED_BINS,
                percentile=_PERCENTILE,
                scenario="same",
            )

    def collect(self, tensors: Mapping[Key, NDArray[Any]]) -> None:
        """Add numbers of tensors."""
        wide = {key: array.astype(np.float32) for key, array in tensors.items()}
        for key, array in wide.items():
            self._largest[key] = max(self._largest.get(key, 0.0), float(np.abs(array).max(initial=0)))
        if self._collector is not None:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints
                self._collector.collect(wide)

    def compute(self) -> dict[Any, float]:
        """Return the range of each tensor."""
        if self._collector is None:
            return dict(self._largest)
        with contextlib.redirect_stdout(io.StringIO()):
            found = self._collector.compute_collection_result()
        return {key: float(np.abs(bounds[:2]).max()) for key, bounds in found.items()}
