"""Threads of PyTorch while small models are run again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# From about so many parameters on a few tokens keep more than one core busy.
_LARGE = 5_000_000


@contextmanager
def fitting_threads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run models of these parameters on one thread where they are small; large ones keep PyTorch's threads.

    Threads that share the work of a small model wait for each other after every
    operation. On a busy machine that takes many times the work itself.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if sum(tensor.numel() for tensor in tensors) < _LARGE else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
