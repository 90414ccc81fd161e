"""Options that several commands take."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import click
from click.core import ParameterSource

from tfexport.config import Config, Setting, options_of, settings
from tfexport.contract import DEVICE, Variant
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.registry import AUTO, names

# Options that accept a token's name, such as the target language of multilingual models.
_NAMED_TOKENS = ("forced_bos_token_id", "decoder_start_token_id")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=Config)


class CommaList(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Values separated by commas."""

    def __init__(self, item: Any) -> None:
        self.item = click.types.convert_type(item)
        self.name = f"{self.item.name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Split a value of the command line; a default is a tuple already."""
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())


class IdsAndNumber(CommaList):
    """Token ids and a number, such as 3,17=-2.5."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the ids and the number; an empty tuple for an empty value."""
        ids, equals, number = value.partition("=")
        if value and not equals:
            self.fail(f"{value!r} has no number; give it as in 3,17=-2", param, ctx)
        return value and (super().convert(ids, param, ctx), click.FLOAT.convert(number, param, ctx))


class NoneOr(click.ParamType):  # type: ignore[type-arg]
    """A value, or "none" to cancel a default of the bundle."""

    def __init__(self, item: Any) -> None:
        self.item = click.types.convert_type(item)
        self.name = self.item.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return None for "none"."""
        return None if value == "none" else self.item.convert(value, param, ctx)


class DeviceType(click.ParamType):  # type: ignore[type-arg]
    """A device that runs models, see `tfexport.contract.DEVICE`, or several of them."""

    def __init__(self, *, several: bool = False) -> None:
        self.several = several
        self.name = "cpu|cuda|cuda:N" + ",…" * several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text if it is a device, or if each part is one."""
        for device in value.split(",") if self.several else [value]:
            if not re.fullmatch(DEVICE.pattern, device):
                self.fail(f"{device!r} is not {DEVICE.expected}", param, ctx)
        return value


def _id_or_token(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value  # `token_ids` looks it up


def _number_or_auto(value: Any) -> Any:
    return value if value == AUTO else click.IntRange(min=1).convert(value, None, None)


class PathOrUri(click.Path):
    """A path, or a URI such as s3://bucket/file, which stays a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path, checked, or the text of a URI."""
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


PATH = click.Path(path_type=Path)
INPUT = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
engine_option = click.option(
    "--engine", help="TensorRT engine of the bundle; by default the only one that works on this machine."
)
device_option = click.option("--device", type=DeviceType(), default="cpu", help="Where the model runs.")
trusted_keys_option = click.option(
    "--trusted-keys",
    type=PATH,
    multiple=True,
    show_default=False,
    callback=lambda _context, _parameter, keys: keys or None,
    help="File of public keys, one of which must have signed the bundle; repeatable.",
)
sign_key_option = click.option("--sign-key", type=PATH, help="Private key (Ed25519, PEM) to sign the output with.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_LOADING = {
    "backend": click.option(
        "--backend", type=click.Choice(names()), default=AUTO, help="Backend that runs the bundle."
    ),
    "variant": click.option(
        "--variant",
        type=click.Choice(get_args(Variant)),
        help="Decoder variant that ONNX Runtime runs; by default the fastest of the bundle on the device.",
    ),
    "device": device_option,
    "engine": engine_option,
    "threads": click.option(
        "--threads",
        type=_number_or_auto,
        metavar="NUMBER OR AUTO",
        default=AUTO,
        help="CPU threads of one call; auto depends on the size of the model and the cores.",
    ),
    "trusted_keys": trusted_keys_option,
}


@dataclass(frozen=True)
class TextRun:
    """Arguments and options of every command that reads texts and runs a bundle."""

    bundle: Path
    texts: tuple[str, ...]
    source: Path | str | None
    output: Path | str | None
    loading: dict[str, Any]
    batch_size: int


def _grouped(command: F, group: str, names: Iterable[str], kind: Callable[..., Any] = dict) -> F:
    """Let a command receive several options as one argument."""

    @functools.wraps(command)
    def grouped(**values: Any) -> Any:
        return command(**{group: kind(**{name: values.pop(name) for name in names})}, **values)

    return cast(F, grouped)


def loading_options(command: F, **changes: Callable[[F], F]) -> F:
    """Add the options of `tfexport.load`, passed as the dictionary `loading`."""
    command = _grouped(command, "loading", _LOADING)
    for add in reversed((_LOADING | changes).values()):
        command = add(command)
    return command


def config_options(config: type[Config], *fields: str, **changes: str | dict[str, Any]) -> Callable[[F], F]:
    """Return a decorator that adds options for `fields`, or all with a help text."""

    # `changes` has, for a field, the name of its option, or arguments of `click.option` that replace the field's.
    def add(command: F) -> F:
        for setting in reversed(settings(config)):
            if setting.name in fields or (setting.help and not fields):
                change = changes.get(setting.name, {})
                more = {"name": change} if isinstance(change, str) else change
                derived = _derived(setting) | more
                command = click.option(derived.pop("name"), setting.name, help=setting.help, **derived)(command)
        return command

    return add


def config_of(kind: type[C], options: dict[str, Any]) -> C:
    """Create a configuration from those options that are fields of it."""
    return kind(**{setting.name: options[setting.name] for setting in settings(kind) if setting.name in options})


def _derived(setting: Setting) -> dict[str, Any]:
    name, default = "--" + setting.name.replace("_", "-"), setting.default
    if setting.types == (bool,):
        return {"name": f"{name}/--no-{name[2:]}" if default else name, "is_flag": True, "default": default}
    derived = {"name": name, "default": default, "show_default": default not in ("", ())}
    lists = [get_args(kind)[0] for kind in setting.types if get_origin(kind) is tuple]
    choices = [choice for kind in setting.types if get_origin(kind) is Literal for choice in get_args(kind)]
    kind: Any = PATH if setting.types[0] is Path else setting.types[0]
    if choices:
        kind = click.Choice(choices)
    elif lists and options_of(lists[0]) == (str,):
        return derived | {"multiple": True}
    elif lists:
        (item,) = options_of(lists[0])
        kind = CommaList(click.Choice(get_args(item)) if get_origin(item) is Literal else item)
    if NoneType in setting.types and (lists or kind in (int, float)):
        kind = NoneOr(kind)
    return derived | {"type": kind}


def token_ids(options: dict[str, Any], target_id: Callable[[str], int] | None) -> dict[str, Any]:
    """Replace names of tokens by ids; `target_id` is None if there is no tokenizer."""
    named = {name: value for name in _NAMED_TOKENS if isinstance(value := options.get(name), str)}
    if named and target_id is None:
        raise InputError(f"{', '.join(named)}: there is no tokenizer that knows tokens by name; give ids")
    return {**options, **{name: target_id(value) for name, value in named.items() if target_id}}


def is_given(name: str) -> bool:
    """Return whether an option of the running command was given."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


# An empty value cancels a default of the bundle.
_REPEATABLE = {"multiple": True, "callback": lambda _context, _parameter, values: tuple(filter(None, values))}
decode_options = config_options(
    DecodeConfig,
    early_stopping={
        "type": click.Choice(["true", "false", "never"]),
        "default": "false",
        "callback": lambda _context, _parameter, value: {"true": True, "false": False}.get(value, value),
    },
    bad_words_ids={"type": CommaList(int), **_REPEATABLE},
    sequence_bias={"type": IdsAndNumber(int), "metavar": "IDS=NUMBER", **_REPEATABLE},
    stop_strings=_REPEATABLE,
    **{x.name: f"--{x.name}/--no-{x.name}".replace("_", "-") for x in settings(DecodeConfig) if x.types == (bool,)},
    **{name: {"type": NoneOr(_id_or_token), "metavar": "ID OR TOKEN"} for name in _NAMED_TOKENS},
)


def text_options(*, bulk: bool = False) -> Callable[[F], F]:
    """Add the options of commands that run a bundle on texts, passed as `run`."""
    path = PathOrUri if bulk else click.Path
    formats = ", or .parquet, .jsonl, .csv, .tsv or .txt, also s3://…" if bulk else ""
    source = click.option(
        "--input",
        "source",
        type=path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path),
        help=f"File with one text per line (- is standard input){formats}.",
    )
    output = click.option(
        "--output",
        type=path(path_type=Path),
        help="File to write, complete or not at all; by default standard output.",
    )
    batch_size = click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Texts in a batch.")
    texts = click.argument("texts", nargs=-1, metavar="[TEXT]...")

    def add(command: F) -> F:
        command = _grouped(command, "run", TextRun.__dataclass_fields__, TextRun)
        for option in (batch_size, loading_options, output, source, texts, click.argument("bundle", type=PATH)):
            command = option(command)
        return command

    return add
