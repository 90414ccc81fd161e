"""The exporter's table of operators, which is the same for every graph of an opset and takes a second to build."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

_MODULE, _TABLE, _BUILD = "torch.onnx._internal.exporter._registration", "ONNXRegistry", "from_torchlib"


@contextlib.contextmanager
def operators_built_once() -> Iterator[None]:
    """Let `torch.onnx.export` take the table that it built for an earlier graph.

    It has no argument for that, so the function that builds it is replaced for the time being. A version of PyTorch
    that keeps it elsewhere builds it each time.
    """
    try:
        table: Any = getattr(importlib.import_module(_MODULE), _TABLE)
        build = getattr(table, _BUILD)
    except (ImportError, AttributeError):
        yield
        return
    with mock.patch.object(table, _BUILD, staticmethod(functools.partial(_built, build))):
        yield


@functools.cache
def _built(build: Any, **opset: int) -> Any:
    return build(**opset)
