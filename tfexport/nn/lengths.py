"""A model for shorter sources and targets than it was made for."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tfexport.errors import ConfigError, raise_all
from tfexport.nn.transformer import Transformer


def shorten(model: Transformer, max_source_length: int | None, max_target_length: int | None) -> None:
    """Limit the lengths and cut the position tables to them, in place.

    Args:
        model: to change.
        max_source_length: None leaves the model's own.
        max_target_length: likewise.

    Raises:
        ConfigError: lists every length that the model does not have.
    """
    wanted = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    limits: dict[str, Any] = {name: length for name, length in wanted.items() if length is not None}
    problems = []
    for name, length in limits.items():
        most = getattr(model.config, name)
        if most is None:
            problems.append(f"{name} is {length}, but the model is an encoder alone; leave it out")
        elif length > most and model.config.positions == "table":
            problems.append(f"{name} is {length}, above the model's position table of {most}; ask for {most} or less")
    raise_all(ConfigError, "export", problems)
    model.config = dataclasses.replace(model.config, **limits)
    for stack, rows in ((model.enc, model.config.max_source_length), (model.dec, model.config.max_target_length)):
        if stack is not None and stack.pos is not None and len(stack.pos) != rows:
            stack.pos = nn.Parameter(stack.pos[:rows].clone(), requires_grad=False)
