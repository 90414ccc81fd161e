"""What Triton is told of a model: config.pbtxt."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

from tfexport.generation import DecodeConfig
from tfexport.integrations.triton.settings import Settings
from tfexport.serve.inference import OUTPUTS

_TYPES = {"BYTES": "STRING"}
_OPTION_TYPES: dict[object, str] = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}
ANY = -1


@dataclass(frozen=True)
class Port:
    """An input or output.

    Attributes:
        name: of the tensor.
        datatype: as the Open Inference Protocol calls it.
        dims: of its shape; -1 for any.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]


def inputs(*, has_texts: bool, stream: bool) -> list[Port]:
    """Return what a model takes: sources, as many as there are, or one of a stream, and every option that is a tensor.

    Args:
        has_texts: the bundle has a tokenizer.
        stream: of the model that streams.
    """
    number = 1 if stream else ANY
    texts = [Port("text_input", "BYTES", (number,))] if has_texts else []
    ids = [Port("input_ids", "INT64", (ANY,) if stream else (ANY, ANY))]
    lengths = [] if stream else [Port("input_lengths", "INT64", (ANY,))]
    return [*texts, *ids, *lengths, Port("prefix", "BYTES", (number,)), *_options()]


def outputs(*, has_texts: bool, stream: bool) -> list[Port]:
    """Return what a model gives; see `inputs`. A stream has one answer, and no dimension for more."""
    there = {name: output for name, output in OUTPUTS.items() if has_texts or name != "text_output"}
    if not stream:
        return [Port(name, datatype, (ANY,) * rank) for name, (datatype, rank) in there.items()]
    lasting = {name: datatype for name, (datatype, _) in there.items() if name != "output_lengths"}
    return [Port(name, datatype, (ANY if name == "output_ids" else 1,)) for name, datatype in lasting.items()]


def describe(name: str, settings: Settings, *, has_texts: bool, stream: bool) -> str:
    """Return the config.pbtxt of a model.

    Args:
        name: of the model.
        settings: what it is served with.
        has_texts: the bundle has a tokenizer.
        stream: several responses to a request.
    """
    lines = [
        f"# Written by tfexport {version('tfexport')}.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "# The engine has queue and batches; a queue policy of Triton would hold requests back for half a second.",
        "max_batch_size: 0",
        f"model_transaction_policy {{ decoupled: {str(stream).lower()} }}",
        "# The engine chooses the device, see the parameters.",
        "instance_group [ { kind: KIND_MODEL, count: 1 } ]",
        *_ports("input", inputs(has_texts=has_texts, stream=stream), optional=True),
        *_ports("output", outputs(has_texts=has_texts, stream=stream), optional=False),
        *(
            f"parameters {{ key: {_quoted(key)}, value: {{ string_value: {_quoted(value)} }} }}"
            for key, value in settings.parameters().items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _ports(kind: str, ports: list[Port], *, optional: bool) -> Iterator[str]:
    more = ", optional: true" if optional else ""
    for port in ports:
        datatype = _TYPES.get(port.datatype, port.datatype)
        yield f"{kind} {{ name: {_quoted(port.name)}, data_type: TYPE_{datatype}, dims: {list(port.dims)}{more} }}"


def _options() -> Iterator[Port]:
    """Yield the options of decoding whose values a tensor can have."""
    for name, kind in typing.get_type_hints(DecodeConfig).items():
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        several = any(typing.get_origin(one) is tuple for one in kinds)
        items = {typing.get_args(one)[0] if typing.get_origin(one) is tuple else one for one in kinds}
        datatype = _OPTION_TYPES.get(*items) if len(items := items - {types.NoneType}) == 1 else None
        if datatype:
            yield Port(name, datatype, (ANY if several else 1,))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
