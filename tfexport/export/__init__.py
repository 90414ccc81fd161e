"""Export a PyTorch model to ONNX graphs and a bundle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfexport.export._pipeline import export_bundle as export_bundle
    from tfexport.export._pipeline import export_module as export_module

__all__ = ["export_bundle", "export_module"]


def __getattr__(name: str) -> Any:
    """Import a public function on first use: the pipeline imports every stage."""
    if name not in __all__:
        raise AttributeError(f"module 'tfexport.export' has no attribute {name!r}")
    return getattr(importlib.import_module("tfexport.export._pipeline"), name)
