"""Tables that encoder and decoder look rows up in: one mapping of the file for both.

ONNX Runtime maps every weight of every graph for itself, so that a page which both have read would count twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.bundle.tables import read_tables
from tfexport.errors import BackendError, first_line

Initializers = dict[str, ort.OrtValue]


def shared_tables(encoder: Path, decoder: Path) -> tuple[Initializers, Initializers]:
    """Map the tables that two graphs have in common, for the CPU.

    Args:
        encoder: path of a graph, its weights beside it.
        decoder: the other, in the same folder.

    Returns:
        For each graph its initializers by name.

    Raises:
        BackendError: a file cannot be read, or is not what it was when the bundle was opened.
    """
    try:
        first, second = (read_tables(path.read_bytes()) for path in (encoder, decoder))
        values = {
            table: ort.OrtValue.ortvalue_from_numpy(
                np.memmap(encoder.parent / table.location, table.dtype, "r", table.offset, table.shape)
            )
            for table in first.keys() & second.keys()
        }
    except (OSError, ValueError) as error:
        raise BackendError(f"ort: {encoder.name} and {decoder.name} do not load: {first_line(error)}") from error
    return {first[table]: value for table, value in values.items()}, {
        second[table]: value for table, value in values.items()
    }
