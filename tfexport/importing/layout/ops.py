"""Folds: what a layout does to a tensor between the checkpoint and the canonical model.

Each works on any device, "meta" included, so that shapes can be checked before
any value is read, and leaves its input as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.layout.arithmetic import evaluate, names_in

Names = Mapping[str, float]


class Step(NamedTuple):
    """One fold: its name and the text behind the name."""

    name: str
    argument: str


class Context(NamedTuple):
    """What a fold may need to know besides the tensor."""

    names: Names
    parts: int
    sibling: Callable[[str], Tensor]

    def number(self, text: str) -> float:
        """Compute an argument."""
        return evaluate(text, self.names)

    def whole(self, text: str) -> int:
        """Compute an argument that counts something.

        Raises:
            CheckpointError: it is no whole number of 0 or more.
        """
        value = self.number(text)
        if value != int(value) or value < 0:
            raise CheckpointError(f"{text} is {value:g}, expected a whole number")
        return int(value)


def squeeze(x: Tensor, _argument: str, _context: Context) -> Tensor:
    """Drop every axis of length 1."""
    return x.squeeze()


def transpose(x: Tensor, _argument: str, _context: Context) -> Tensor:
    """Swap the last two axes; a vector stays as it is, so that a bias may take the same line."""
    return x.transpose(-1, -2) if x.dim() > 1 else x


def flatten(x: Tensor, _argument: str, _context: Context) -> Tensor:
    """Merge the first two axes, as of projections stored by head; a vector stays as it is."""
    return x.flatten(0, 1) if x.dim() > 1 else x


def expand(x: Tensor, _argument: str, context: Context) -> Tensor:
    """Repeat a single number d_model times; what has d_model numbers stays as it is."""
    return x.reshape(-1).expand(int(context.names["d_model"])) if x.numel() == 1 else x


def add(x: Tensor, argument: str, context: Context) -> Tensor:
    """Add a number."""
    number = context.number(argument)
    return _computed(x, lambda wide: wide + number)


def mul(x: Tensor, argument: str, context: Context) -> Tensor:
    """Multiply by a number."""
    number = context.number(argument)
    return _computed(x, lambda wide: wide * number)


def add_scaled(x: Tensor, argument: str, context: Context) -> Tensor:
    """Add a number times the tensor beside it: `add_scaled 1e-5 weight` on a bias."""
    factor, name = argument.rsplit(maxsplit=1)
    number, other = context.number(factor), context.sibling(name)
    return _computed(x, lambda wide: wide + number * other.double())


def block_diag(x: Tensor, _argument: str, context: Context) -> Tensor:
    """Give each head its copy of a projection that all heads share."""
    heads = int(context.names["num_heads"])
    if x.dim() != 2:
        return _joined([x] * heads, 0)
    height, width = x.shape
    whole = x.new_zeros(heads * height, heads * width)
    for head in range(heads):
        whole[head * height : (head + 1) * height, head * width : (head + 1) * width] = x
    return whole


def heads_last(x: Tensor, _argument: str, context: Context) -> Tensor:
    """Reorder rows that count (d_k, heads) to (heads, d_k)."""
    heads = int(context.names["num_heads"])
    if x.shape[0] % heads:
        raise CheckpointError(f"has {x.shape[0]} rows, which {heads} heads do not divide")
    return x.reshape(-1, heads, *x.shape[1:]).transpose(0, 1).flatten(0, 1)


def slice_rows(x: Tensor, argument: str, context: Context) -> Tensor:
    """Drop the first rows."""
    first = context.whole(argument)
    if first >= x.shape[0]:
        raise CheckpointError(f"has {x.shape[0]} rows, nothing is left from row {first}")
    return x[first:]


def rows(x: Tensor, argument: str, context: Context) -> Tensor:
    """Take rows by number, in this order."""
    wanted = [context.whole(part) for part in argument.split(",")]
    if beyond := [row for row in wanted if row >= x.shape[0]]:
        raise CheckpointError(f"has {x.shape[0]} rows, there is no row {beyond[0]}")
    return x[wanted]


def zero_row(x: Tensor, argument: str, context: Context) -> Tensor:
    """Set one row to 0."""
    row = context.whole(argument)
    if row >= x.shape[0]:
        raise CheckpointError(f"has {x.shape[0]} rows, there is no row {row}")
    x = x.clone()
    x[row] = 0
    return x


def append_zero_row(x: Tensor, _argument: str, _context: Context) -> Tensor:
    """Put a row of 0 behind the last."""
    return _joined((x, torch.zeros_like(x[:1])), 0)


def split_rows(x: Tensor, argument: str, context: Context) -> Sequence[Tensor]:
    """Cut blocks of rows, equal ones unless sizes are given."""
    if argument:
        sizes = [context.whole(part) for part in argument.strip("[]").split(",")]
    else:
        sizes = [x.shape[0] // context.parts] * context.parts
    if sum(sizes) != x.shape[0] or len(sizes) != context.parts:
        raise CheckpointError(
            f"has {x.shape[0]} rows, expected {' + '.join(map(str, sizes))} for {context.parts} parts"
        )
    return torch.split(x, sizes)


def split_heads(x: Tensor, _argument: str, context: Context) -> Sequence[Tensor]:
    """Cut rows that count (heads, parts, d_k)."""
    heads, parts = int(context.names["num_heads"]), context.parts
    if x.shape[0] % (heads * parts):
        raise CheckpointError(f"has {x.shape[0]} rows, which {heads} heads of {parts} parts do not divide")
    return [part.flatten(0, 1) for part in x.reshape(heads, parts, -1, *x.shape[1:]).unbind(1)]


def _computed(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute in float64 and return to the dtype of `x`, to float32 from float16 and bfloat16, which could not hold it.

    On "meta" nothing is computed: even a sum has PyTorch load its compiler there.
    """
    wide = x if x.is_meta else compute(x.double())
    return wide.to(torch.promote_types(x.dtype, torch.float32))


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Put tensors behind each other, as torch.cat does, which on "meta" loads the compiler."""
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    whole, start = tensors[0].new_empty(shape), 0
    for tensor in tensors:
        whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
        start += tensor.shape[axis]
    return whole


class Operation(NamedTuple):
    """A fold, whether it takes an argument, and whether it makes several tensors of one."""

    run: Callable[[Tensor, str, Context], Tensor | Sequence[Tensor]]
    argument: str = ""
    splits: bool = False


# `argument` is what may stand behind the name: an expression, a list of them, with ? where it may be left out.
OPERATIONS: dict[str, Operation] = {
    "squeeze": Operation(squeeze),
    "transpose": Operation(transpose),
    "flatten": Operation(flatten),
    "expand": Operation(expand),
    "add": Operation(add, "expression"),
    "mul": Operation(mul, "expression"),
    "add_scaled": Operation(add_scaled, "expression name"),
    "block_diag": Operation(block_diag),
    "heads_last": Operation(heads_last),
    "slice": Operation(slice_rows, "expression"),
    "rows": Operation(rows, "list"),
    "zero_row": Operation(zero_row, "expression"),
    "append_zero_row": Operation(append_zero_row),
    "split_rows": Operation(split_rows, "list?", splits=True),
    "split_heads": Operation(split_heads, splits=True),
}
# Joins keys that are one a head; stands first in its line.
JOINS = {"join_rows": 0, "join_columns": 1}


def parse_step(text: str) -> Step:
    """Parse one fold.

    Raises:
        ConfigError: the name is unknown or the argument is missing, superfluous or malformed.
    """
    name, _, argument = text.strip().partition(" ")
    argument = argument.strip()
    if name in JOINS:
        wanted = ""
    elif name in OPERATIONS:
        wanted = OPERATIONS[name].argument
    else:
        raise ConfigError(f"fold {name!r} is unknown, expected one of {', '.join((*OPERATIONS, *JOINS))}")
    if argument and not wanted:
        raise ConfigError(f"fold {name} takes no argument, got {argument!r}")
    if not argument and wanted and not wanted.endswith("?"):
        raise ConfigError(f"fold {name} needs an argument: {wanted}")
    for expression in _expressions(argument, wanted):
        names_in(expression)
    return Step(name, argument)


def _expressions(argument: str, wanted: str) -> list[str]:
    if not argument:
        return []
    if wanted == "expression name":
        words = argument.rsplit(maxsplit=1)
        if len(words) != 2 or not re.fullmatch("[a-z_]+", words[1]):
            raise ConfigError(f"fold add_scaled has {argument!r}, expected an expression and a name such as weight")
        return words[:1]
    return argument.strip("[]").split(",") if wanted.startswith("list") else [argument]


def run(steps: Sequence[Step], tensors: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Apply folds in order.

    Args:
        steps: of one line; what stands behind a split is done to each part.
        tensors: one, or one for each head.
        context: sizes by name, the number of parts wanted, and the tensors beside.

    Returns:
        As many tensors as there are parts.

    Raises:
        CheckpointError: a tensor has not the shape that a fold needs.
        ConfigError: an expression has no value.
    """
    found = list(tensors)
    for step in steps:
        if step.name in JOINS:
            found = [_join(found, JOINS[step.name])]
            continue
        operation, several = OPERATIONS[step.name], list[Tensor]()
        for tensor in found:
            made = operation.run(tensor, step.argument, context)
            several.extend([made] if isinstance(made, Tensor) else made)
        found = several
    return found


def _join(tensors: Sequence[Tensor], axis: int) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise CheckpointError(f"has heads of shapes {', '.join(str(list(s)) for s in sorted(shapes))}, expected one")
    if tensors[0].dim() <= axis:
        raise CheckpointError(f"has {tensors[0].dim()} axes, expected {axis + 1} to join columns")
    return _joined(tensors, axis)
