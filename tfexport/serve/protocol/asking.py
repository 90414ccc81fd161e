"""Asking an engine: a text or token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tfexport.decode.result import Hypothesis
from tfexport.errors import ConfigError, InputError, shortened
from tfexport.model.result import Result
from tfexport.serve.engine import Engine
from tfexport.serve.generation import Generation
from tfexport.serve.protocol.errors import InvalidRequestError

Source: TypeAlias = str | list[int]
Answer: TypeAlias = Result | Hypothesis
Asked: TypeAlias = Generation[str, Result] | Generation[int, Hypothesis]
# Token ids are int64 in the graphs.
MAX_ID = 2**63 - 1


def source_of(data: Mapping[str, Any]) -> Source:
    """Return what a request is about: `text_input`, or `input_ids`.

    Raises:
        InvalidRequestError: neither or both are given, or it is none.
    """
    given = [name for name in ("text_input", "input_ids") if name in data]
    if len(given) != 1:
        raise InvalidRequestError(f"{' and '.join(given) or 'nothing'} is given, expected text_input or input_ids")
    return text(data["text_input"], "text_input") if given == ["text_input"] else ids(data["input_ids"], "input_ids")


def text(value: object, name: str) -> str:
    """Return a text, checked."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {shortened(value)}, expected a text")
    return value


def ids(value: object, name: str) -> list[int]:
    """Return token ids, checked; the engine knows which ones there are."""
    # All at once: one after the other takes ten times as long.
    if (
        not isinstance(value, list)
        or not set(map(type, value)) <= {int}
        or not -MAX_ID <= min(value, default=0) <= max(value, default=0) <= MAX_ID
    ):
        raise InvalidRequestError(f"{name} is {shortened(value)}, expected a list of token ids")
    return value


def submit(engine: Engine, source: Source, arguments: Mapping[str, Any], *, stream: bool = False) -> Asked:
    """Ask an engine.

    Args:
        engine: started.
        source: text or token ids.
        arguments: of `Engine.submit`; the prefix is of the kind of the source.
        stream: hand out what comes.

    Raises:
        InvalidRequestError: the prefix is none.
        TfexportError: those of `Engine.submit`.
    """
    given = dict(arguments)
    if isinstance(source, str):
        given["prefix"] = text(given.get("prefix", ""), "prefix")
        return engine.submit(source, stream=stream, **given)
    given["prefix"] = ids(given.get("prefix", []), "prefix")
    return engine.submit_ids(source, stream=stream, **given)


def submit_all(engine: Engine, sources: Sequence[Source], arguments: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """Ask an engine for several sources; when one is refused, none is asked for. See `submit`.

    Raises:
        InvalidRequestError: a prefix is none.
        TfexportError: those of `Engine.submit`; says which source.
    """
    with contextlib.ExitStack() as refused:
        asked: list[Asked] = []
        for number, (source, given) in enumerate(zip(sources, arguments, strict=True), 1):
            try:
                asked.append(submit(engine, source, given))
            except (InputError, ConfigError) as error:
                where = f"source {number} of {len(sources)}: " if len(sources) > 1 else ""
                raise type(error)(f"{where}{error}") from error
            refused.callback(asked[-1].cancel)
        refused.pop_all()
        return asked
