"""The exporter's table of operators, which is the same for every graph of an opset and takes a second to build."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

_MODULE, _TABLE, _BUILD = "torch.onnx._internal.exporter._registration", "ONNXRegistry", "from_torchlib"
_OPSET, _CHOOSE = "_opset_version", "_cleanup_registry_based_on_opset_version"


@contextlib.contextmanager
def operators_built_once() -> Iterator[None]:
    """Let `torch.onnx.export` take the table that was built for an earlier graph, of whatever opset.

    It has no argument for that, so the function that builds it is replaced for the time being. A version of PyTorch
    that keeps it elsewhere builds it each time.
    """
    try:
        table: Any = getattr(importlib.import_module(_MODULE), _TABLE)
        build, _ = getattr(table, _BUILD), getattr(table, _CHOOSE)
    except (ImportError, AttributeError):
        yield
        return
    with mock.patch.object(table, _BUILD, staticmethod(functools.partial(_of_opset, table, build))):
        yield


@functools.cache
def _of_opset(table: Any, build: Any, *, opset_version: int) -> Any:
    """Choose from the operators of all opsets as `build` does from those that it has just put together."""
    chosen = copy.copy(_of_all(table, build))
    setattr(chosen, _OPSET, opset_version)
    getattr(chosen, _CHOOSE)()  # replaces what was copied
    return chosen


@functools.cache
def _of_all(table: Any, build: Any) -> Any:
    with mock.patch.object(table, _CHOOSE):
        return build()
