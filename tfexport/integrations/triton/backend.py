"""Run an engine in Triton's Python backend.

`execute` passes requests to the engine and returns, so that later requests join the running batch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tfexport import errors
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BackendError, BundleError, TfexportError
from tfexport.integrations.triton._config import BUNDLE, Settings
from tfexport.integrations.triton._requests import EngineThread, as_array, read_request
from tfexport.serve.inference import Tensor, bounded

MAX_STREAM_BUFFER = 1_000_000
logger = logging.getLogger(__name__)
# Names of error codes, because Triton adds the class with the codes to its module only after this import.
_CODES: dict[str, tuple[type[TfexportError], ...]] = {
    "INVALID_ARG": (errors.ConfigError, errors.InputError),
    "CANCELLED": (errors.Cancelled,),
    "UNAVAILABLE": (errors.QueueFull, errors.Draining, errors.DeadlineExceeded),
}


class TritonPythonModel:
    """An instance of a model; Triton runs it in its own process, one method at a time."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle; raise `TritonModelException` if it cannot be served."""
        config = json.loads(args["model_config"])
        self._stream = pb_utils.using_decoupled_model_transaction_policy(config)
        try:
            self._settings = Settings.read({name: one["string_value"] for name, one in config["parameters"].items()})
            bundle = Path(args["model_repository"], args["model_version"], BUNDLE)
            if (sha256 := open_bundle(bundle, weights=False).sha256) != self._settings.bundle_sha256:
                problem = f"has the sha256 {sha256}, config.pbtxt names {self._settings.bundle_sha256}"
                raise BundleError(f"bundle {bundle} {problem}; write the repository anew")
            # Triton buffers all output for its clients, so slow clients cannot be detected here.
            serving = dataclasses.replace(self._settings.serving, stream_buffer=MAX_STREAM_BUFFER)
            self._thread = EngineThread(bundle, serving, stream=self._stream, **self._settings.loading)
        except TfexportError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: Sequence[Any]) -> None:
        """Pass requests to the engine, which answers each through its own sender."""
        for request in requests:
            reply = _Reply(request.get_response_sender())
            try:
                sources, options = read_request(request, self._settings.limits, stream=self._stream)
            except TfexportError as error:
                self._thread.reject(reply, error)
            except Exception:
                logger.exception("a request could not be read")
                self._thread.reject(reply, BackendError("the request could not be read; see the server's log"))
            else:
                self._thread.answer(sources, options, reply)

    def is_ready(self) -> bool:
        """Return whether the engine accepts requests; newer versions of Triton call this."""
        return self._thread.engine.is_ready

    def finalize(self) -> None:
        """Answer all accepted requests and free the bundle."""
        self._thread.finish()


class _Reply:
    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, outputs: Mapping[str, Tensor], *, is_last: bool) -> None:
        tensors = [pb_utils.Tensor(name, as_array(tensor)) for name, tensor in outputs.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        self._sender.send(pb_utils.InferenceResponse(tensors), flags=flags)

    def fail(self, error: TfexportError) -> None:
        code = next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), "INTERNAL")
        triton_error = pb_utils.TritonError(bounded(str(error)), getattr(pb_utils.TritonError, code))
        response = pb_utils.InferenceResponse([], triton_error)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())
