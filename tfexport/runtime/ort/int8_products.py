"""Select exact 8-bit kernels of ONNX Runtime for this CPU.

The fastest 8-bit kernels for x86 CPUs with AVX2 but without VNNI add two products in 16 bits, which can saturate:
https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html. A session option of ONNX Runtime selects
slower, exact kernels. A small stored product tests whether the option is needed, because CPU flags depend on the
operating system.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.errors import BackendError

# One product for each operator of a quantized bundle. Every factor is at the end of its range, so that two products
# exceed 16 bits. tests/runtime/ort/test_int8_products.py writes the same file and compares.
PROBE = Path(__file__).with_name("int8_products.onnx")
INPUTS, OUTPUTS = 64, 16
# Each output of the probe in columns 0, 2, …; columns 1, 3, … have the negative number.
EXPECTED = {"integers": INPUTS * 255 * 127.0, "blocks8": INPUTS * 127 * 127.0, "blocks4": INPUTS * 127 * 7.0}
# ONNX Runtime has separate kernels for one row and for several.
_ROWS = (1, 8)
_TOLERANCE = 1e-3  # some kernels also round the inputs; saturation changes a result by half
# The fastest options first.
_OPTIONS: tuple[dict[str, str], ...] = ({}, {"session.x64quantprecision": "1"})


@cache
def int8_session_options() -> Mapping[str, str]:
    """Return the fastest session options with exact 8-bit products on this CPU."""
    for entries in _OPTIONS:
        wrong = _wrong_outputs(entries)
        if not wrong:
            return entries
    raise BackendError(
        f"ort: onnxruntime {ort.__version__} computes wrong 8-bit products on this CPU ({', '.join(wrong)}); "
        "update onnxruntime, or export the model again with --precision fp32"
    )


def describe_int8_products() -> str:
    """Describe how this CPU multiplies 8-bit integers."""
    try:
        return "exact, by slower kernels (no VNNI)" if int8_session_options() else "exact, by the fastest kernels"
    except BackendError as error:
        return str(error)


def _wrong_outputs(entries: dict[str, str]) -> list[str]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(PROBE.read_bytes(), options, providers=["CPUExecutionProvider"])
    signs = np.where(np.arange(OUTPUTS) % 2, -1, 1)
    wrong = []
    for rows in _ROWS:
        inputs = {"bytes": np.full((rows, INPUTS), 255, np.uint8), "floats": np.full((rows, INPUTS), 127, np.float32)}
        for (name, expected), found in zip(EXPECTED.items(), session.run(list(EXPECTED), inputs), strict=True):
            if not np.allclose(found, expected * signs, rtol=_TOLERANCE):
                wrong.append(f"{name} with {rows} rows: got {found.flat[0]:.0f}, expected {expected:.0f}")
    return wrong
