"""Create modules on the device "meta": names and shapes without memory or values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions that initialize parameters.
_DRAWS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


@contextmanager
def on_meta() -> Iterator[None]:
    """Create modules on the device "meta" without drawing initial values.

    Drawing has no effect there, but takes time: a normal distribution makes PyTorch load its compiler, which takes
    longer than a small import.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else named["tensor"]
        return func(*args, **named)
