"""Modules on the device "meta": names and shapes without memory and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What modules fill their parameters with when they are made.
_DRAWS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


@contextmanager
def on_meta() -> Iterator[None]:
    """Make modules on the device "meta", whose initial values nobody draws.

    Drawing there changes nothing and takes its time: a normal distribution has
    PyTorch load its compiler, which alone takes longer than a small import.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves out what draws random values in place."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else named["tensor"]
        return func(*args, **named)
