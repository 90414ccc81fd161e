"""Run one graph on the CPU, apart from sessions and batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.errors import BackendError, first_line

Arrays = dict[str, NDArray[Any]]


class HostGraph:
    """A serialized graph whose weights are in files of `folder`."""

    def __init__(self, name: str, data: bytes, folder: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # see OrtDevice
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        try:
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BackendError(
                f"ort: {name} does not load in onnxruntime {ort.__version__}: {first_line(error)}"
            ) from error
        self._name, self._outputs = name, [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return all outputs by name."""
        try:
            values = self._session.run(self._outputs, {name: np.ascontiguousarray(x) for name, x in inputs.items()})
        except Exception as error:
            raise BackendError(f"ort: {self._name} failed while running: {first_line(error)}") from error
        return dict(zip(self._outputs, values, strict=True))
