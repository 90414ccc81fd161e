"""Export PyTorch encoder-decoder transformers to verified bundles, and run them.

Public names load on first use, so that `import tfexport` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from tfexport.errors import BackendError as BackendError
    from tfexport.errors import BenchError as BenchError
    from tfexport.errors import BundleError as BundleError
    from tfexport.errors import Cancelled as Cancelled
    from tfexport.errors import CheckpointError as CheckpointError
    from tfexport.errors import ConfigError as ConfigError
    from tfexport.errors import DeadlineExceeded as DeadlineExceeded
    from tfexport.errors import Draining as Draining
    from tfexport.errors import EngineError as EngineError
    from tfexport.errors import EngineFailed as EngineFailed
    from tfexport.errors import GraphError as GraphError
    from tfexport.errors import InputError as InputError
    from tfexport.errors import ParityError as ParityError
    from tfexport.errors import QueueFull as QueueFull
    from tfexport.errors import ServingError as ServingError
    from tfexport.errors import TfexportError as TfexportError
    from tfexport.export import export_bundle as export_bundle
    from tfexport.generation import DecodeConfig as DecodeConfig
    from tfexport.importing.importer import import_checkpoint as import_checkpoint
    from tfexport.importing.reference.outputs import record_reference as record_reference
    from tfexport.importing.reference.texts import RecordedTexts as RecordedTexts
    from tfexport.model.load import load as load
    from tfexport.model.model import Model as Model
    from tfexport.model.result import Result as Result
    from tfexport.tensorrt.pipeline import build_engines as build_engines

# Public names and their modules.
_ERRORS = (
    "BackendError BenchError BundleError Cancelled CheckpointError ConfigError DeadlineExceeded Draining EngineError "
    "EngineFailed GraphError InputError ParityError QueueFull ServingError TfexportError"
)
_MODULES = {
    **dict.fromkeys(_ERRORS.split(), "errors"),
    "load": "model.load",
    "Model": "model.model",
    "Result": "model.result",
    "DecodeConfig": "generation",
    "RecordedTexts": "importing.reference.texts",
    "record_reference": "importing.reference.outputs",
    "import_checkpoint": "importing.importer",
    "export_bundle": "export",
    "build_engines": "tensorrt.pipeline",
}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("tfexport")
    if name not in _MODULES:
        raise AttributeError(f"module 'tfexport' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tfexport.{_MODULES[name]}"), name)
