"""Define the folds: operations that turn checkpoint tensors into canonical ones.

Folds do not modify their input. They also work on the device "meta", to check shapes before any value is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.layout._grammar import Names, evaluate, names_in

SINUSOIDS = ("interleaved", "interleaved_exp", "halves_t2t", "halves_paper", "columns")


class Step(NamedTuple):
    """A fold and its arguments: expressions, and for "add_scaled" a name at the end."""

    name: str
    arguments: tuple[str, ...] = ()


class Context(NamedTuple):
    """Sizes, number of parts and, for `post`, other tensors that a fold reads."""

    names: Names
    parts: int = 1
    target: str = ""
    made: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.names["num_heads"])

    def whole(self, text: str) -> int:
        """Compute an expression whose value must be a non-negative integer."""
        value = evaluate(text, self.names)
        if value != int(value) or value < 0:
            raise CheckpointError(f"{text} is {value:g}, expected a whole number")
        return int(value)


class Operation(NamedTuple):
    """A fold: `run(tensor, context, *arguments)`, or `run(tensors, context)` to join."""

    run: Callable[..., Tensor | Sequence[Tensor]]
    takes: Literal["", "number", "whole", "list", "list?", "number name"] = ""
    shape: Literal["", "splits", "joins"] = ""


def _expand(x: Tensor, context: Context) -> Tensor:
    return x.reshape(-1).expand(int(context.names["d_model"])) if x.numel() == 1 else x


def _add_scaled(x: Tensor, context: Context, number: float, name: str) -> Tensor:
    neighbor = f"{context.target.rpartition('.')[0]}.{name}"
    if neighbor not in context.made:
        raise CheckpointError(f"needs {neighbor}, which is missing; add_scaled belongs in post")
    other = context.made[neighbor]
    return _computed(x, lambda wide: wide + number * other.double())


def _block_diag(x: Tensor, context: Context) -> Tensor:
    # Each head gets a copy of the projection that all heads share.
    heads = context.heads
    if x.dim() != 2:
        return _joined([x] * heads, 0)
    height, width = x.shape
    whole = x.new_zeros(heads * height, heads * width)
    for head in range(heads):
        whole[head * height : (head + 1) * height, head * width : (head + 1) * width] = x
    return whole


def _heads_last(x: Tensor, context: Context) -> Tensor:
    # The rows are ordered (d_k, heads) and become (heads, d_k).
    if x.shape[0] % context.heads:
        raise CheckpointError(f"has {x.shape[0]} rows, which {context.heads} heads do not divide")
    return x.reshape(-1, context.heads, *x.shape[1:]).transpose(0, 1).flatten(0, 1)


def _check_rows(x: Tensor, rows: Sequence[int]) -> None:
    if beyond := [row for row in rows if row >= x.shape[0]]:
        raise CheckpointError(f"has {x.shape[0]} rows, there is no row {beyond[0]}")


def _slice(x: Tensor, _: Context, first: int) -> Tensor:
    _check_rows(x, [first])
    return x[first:]


def _rows(x: Tensor, _: Context, *rows: int) -> Tensor:
    _check_rows(x, rows)
    return x[list(rows)]


def _zero_row(x: Tensor, _: Context, row: int) -> Tensor:
    _check_rows(x, [row])
    x = x.clone()
    x[row] = 0
    return x


def _split_rows(x: Tensor, context: Context, *given: int) -> Sequence[Tensor]:
    sizes = list(given) or [x.shape[0] // context.parts] * context.parts
    if sum(sizes) != x.shape[0] or len(sizes) != context.parts:
        expected = f"{' + '.join(map(str, sizes))} for {context.parts} parts"
        raise CheckpointError(f"has {x.shape[0]} rows, expected {expected}")
    return torch.split(x, sizes)


def _split_heads(x: Tensor, context: Context) -> Sequence[Tensor]:
    # The rows are ordered (heads, parts, d_k).
    heads, parts = context.heads, context.parts
    if x.shape[0] % (heads * parts):
        raise CheckpointError(f"has {x.shape[0]} rows, which {heads} heads of {parts} parts do not divide")
    return [part.flatten(0, 1) for part in x.reshape(heads, parts, -1, *x.shape[1:]).unbind(1)]


def _join(tensors: Sequence[Tensor], axis: int) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise CheckpointError(f"has heads of shapes {', '.join(str(list(s)) for s in sorted(shapes))}, expected one")
    if tensors[0].dim() <= axis:
        raise CheckpointError(f"has {tensors[0].dim()} axes, expected {axis + 1} to join columns")
    return _joined(tensors, axis)


def _computed(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute in float64; return the dtype of `x`, or float32 for 16-bit floats.

    On "meta", nothing is computed, because even a sum makes PyTorch load its compiler.
    """
    wide = x if x.is_meta else compute(x.double())
    return wide.to(torch.promote_types(x.dtype, torch.float32))


def product(weight: Tensor, x: Tensor, added: Tensor | None = None) -> Tensor:
    """Return `weight` [m, n] times `x` [n, …], plus `added`, as `_computed` does."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[0]:
        raise CheckpointError(f"{list(weight.shape)} does not fit {list(x.shape)}")
    if weight.is_meta:
        return weight.new_empty((weight.shape[0], *x.shape[1:]), dtype=torch.promote_types(weight.dtype, torch.float32))
    offset = 0 if added is None else added.double()
    return _computed(weight, lambda wide: wide @ x.double() + offset)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate without torch.cat, which loads the compiler on "meta"."""
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    whole, start = tensors[0].new_empty(shape), 0
    for tensor in tensors:
        whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
        start += tensor.shape[axis]
    return whole


# "transpose" and "flatten" leave a vector unchanged, so that a bias can use the same line.
OPERATIONS = {
    "squeeze": Operation(lambda x, _: x.squeeze()),
    "transpose": Operation(lambda x, _: x.transpose(-1, -2) if x.dim() > 1 else x),
    "flatten": Operation(lambda x, _: x.flatten(0, 1) if x.dim() > 1 else x),
    "expand": Operation(_expand),
    "add": Operation(lambda x, _, number: _computed(x, lambda wide: wide + number), "number"),
    "mul": Operation(lambda x, _, number: _computed(x, lambda wide: wide * number), "number"),
    "add_scaled": Operation(_add_scaled, "number name"),
    "block_diag": Operation(_block_diag),
    "heads_last": Operation(_heads_last),
    "slice": Operation(_slice, "whole"),
    "rows": Operation(_rows, "list"),
    "zero_row": Operation(_zero_row, "whole"),
    "append_zero_row": Operation(lambda x, _: _joined((x, torch.zeros_like(x[:1])), 0)),
    "copy": Operation(lambda x, context: [x] * context.parts, shape="splits"),
    "split_rows": Operation(_split_rows, "list?", "splits"),
    "split_heads": Operation(_split_heads, shape="splits"),
    "join_rows": Operation(lambda tensors, _: _join(tensors, 0), shape="joins"),
    "join_columns": Operation(lambda tensors, _: _join(tensors, 1), shape="joins"),
}


def parse_step(text: str) -> Step:
    """Parse one fold."""
    name, _, argument = text.strip().partition(" ")
    argument = argument.strip()
    if name not in OPERATIONS:
        raise ConfigError(f"fold {name!r} is unknown, expected one of {', '.join(OPERATIONS)}")
    takes = OPERATIONS[name].takes
    if argument and not takes:
        raise ConfigError(f"fold {name} takes no argument, got {argument!r}")
    if not argument:
        if takes and takes != "list?":
            raise ConfigError(f"fold {name} needs an argument: {takes}")
        return Step(name)
    parts = argument.strip("[]").split(",") if takes.startswith("list") else [argument]
    if takes == "number name":
        parts = argument.rsplit(maxsplit=1)
        if len(parts) != 2 or not re.fullmatch("[a-z_]+", parts[1]):
            raise ConfigError(f"fold {name} has {argument!r}, expected an expression and a name such as weight")
    for expression in parts[:1] if takes == "number name" else parts:
        names_in(expression)
    return Step(name, tuple(parts))


def run(steps: Sequence[Step], tensors: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Apply folds in order; folds after a split apply to each part."""
    found = list(tensors)
    for name, texts in steps:
        operation, arguments = OPERATIONS[name], list[object]()
        if operation.takes.startswith("number"):
            arguments = [evaluate(texts[0], context.names), *texts[1:]]
        elif operation.takes:
            arguments = [context.whole(text) for text in texts]
        made = [operation.run(x, context, *arguments) for x in ([found] if operation.shape == "joins" else found)]
        found = [part for one in made for part in ([one] if isinstance(one, Tensor) else one)]
    return found


def sinusoid(kind: str, length: int, d_model: int) -> Tensor:
    """Compute a sinusoidal position table, float32 [length, d_model].

    docs/reference/layouts.md lists the kinds. If d_model is odd, there is one more sine than cosines, and "halves_t2t"
    ends with a column of 0.
    """
    wide = torch.float64 if kind in ("halves_paper", "columns") else torch.float32
    position, column = torch.arange(length, dtype=wide)[:, None], torch.arange(0, d_model, 2, dtype=wide)
    half = d_model // 2
    if kind == "columns":
        every = torch.arange(d_model, dtype=wide)
        waves = position / 10000 ** (2 * every / d_model)
        return torch.where(every % 2 == 0, waves.sin(), waves.cos()).float()
    if kind == "interleaved_exp":
        angle = position * torch.exp(column * -(math.log(10000.0) / d_model))
    elif kind == "halves_t2t":
        angle = position * torch.exp(torch.arange(half, dtype=wide) * -(math.log(10000) / max(half - 1, 1)))
    else:
        angle = position / 10000 ** (column / d_model)
    table, sines = torch.zeros(length, d_model, dtype=wide), angle.shape[1]
    first, second = slice(0, sines), slice(sines, sines + half)
    if kind.startswith("interleaved"):
        first, second = slice(0, None, 2), slice(1, None, 2)
    table[:, first], table[:, second] = angle.sin(), angle[:, :half].cos()
    return table.float()
