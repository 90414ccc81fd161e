"""Options that several commands take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import click
from click.core import ParameterSource

from tfexport.config import Config, options_of, settings
from tfexport.contract import Device, Form
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.registry import AUTO, names

# Options that say the target's language in multilingual models.
_BY_NAME = ("forced_bos_token_id", "decoder_start_token_id")
F = TypeVar("F", bound=Callable[..., Any])


class CommaList(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Values separated by commas."""

    def __init__(self, item: click.ParamType) -> None:  # type: ignore[type-arg]
        self.item = item
        self.name = f"{item.name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Split a value of the command line; a default is a tuple already."""
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())


class NoneOr(click.ParamType):  # type: ignore[type-arg]
    """A value, or "none", which takes back what a bundle brings."""

    def __init__(self, item: click.ParamType) -> None:  # type: ignore[type-arg]
        self.item = item
        self.name = item.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return None for "none"."""
        return None if value == "none" else self.item.convert(value, param, ctx)


class Token(click.ParamType):  # type: ignore[type-arg]
    """An id, or a token by its name, which `token_ids` looks up."""

    name = "id or token"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return an int for an id, else the name."""
        try:
            return int(value)
        except ValueError:
            return str(value)


class NumberOrAuto(click.ParamType):  # type: ignore[type-arg]
    """A number from 1, or "auto"."""

    name = "number or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return "auto" as it is."""
        return value if value == AUTO else click.IntRange(min=1).convert(value, param, ctx)


class PathOrUri(click.Path):
    """A path, or a URI such as s3://bucket/file, which stays a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path, checked, or the text of a URI."""
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


PATH = click.Path(path_type=Path)
IDS = CommaList(click.IntRange(min=0))
INPUT = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
engine_option = click.option(
    "--engine", help="TensorRT engine of the bundle; by default the only one that runs on this machine."
)
device_option = click.option("--device", type=click.Choice(get_args(Device)), default="cpu", help="Where graphs run.")
trusted_keys_option = click.option(
    "--trusted-keys",
    type=PATH,
    multiple=True,
    show_default=False,
    callback=lambda _context, _parameter, keys: keys or None,
    help="File of public keys, one of which must have signed what is loaded; repeatable.",
)
sign_key_option = click.option("--sign-key", type=PATH, help="Private key (Ed25519, PEM) that signs what is written.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_LOADING = {
    "backend": click.option("--backend", type=click.Choice(names()), default=AUTO, help="What runs the bundle."),
    "form": click.option(
        "--form",
        type=click.Choice(get_args(Form)),
        help="Decoder graph that ONNX Runtime runs; by default the fastest that bundle and device have.",
    ),
    "device": device_option,
    "engine": engine_option,
    "threads": click.option(
        "--threads",
        type=NumberOrAuto(),
        default=AUTO,
        help="CPU threads of ONNX Runtime; auto chooses by the size of the model and the cores.",
    ),
    "trusted_keys": trusted_keys_option,
}


def loading_options(command: F) -> F:
    """Add the options of `tfexport.load`; the command receives them as one dictionary, `loading`."""

    @functools.wraps(command)
    def grouped(**values: Any) -> Any:
        return command(loading={name: values.pop(name) for name in _LOADING}, **values)

    for add in reversed(_LOADING.values()):
        grouped = add(grouped)
    return cast(F, grouped)


def field_option(config: type[Config], field: str, *names: str, **more: Any) -> Callable[[F], F]:
    """Make the option of a setting: its type, default and help are those of the field.

    Args:
        config: that has the field.
        field: its name, and that of the option with "-" for "_".
        names: of the option, where they are others.
        more: of `click.option`, in place of what the field says.
    """
    setting = next(setting for setting in settings(config) if setting.name == field)
    kind = setting.types[0]
    derived: dict[str, Any] = {"help": setting.help, "default": setting.default}
    if words := [word for one in setting.types if get_origin(one) is Literal for word in get_args(one)]:
        derived["type"] = click.Choice(words)
    elif kind is bool:
        derived["is_flag"] = True
    elif get_origin(kind) is tuple:
        item = options_of(get_args(kind)[0])[0]
        derived |= {"multiple": True} if item is str else {"type": CommaList(_item_type(item)), "show_default": False}
    else:
        derived["type"] = PATH if kind is Path else kind
    if derived["default"] == "":
        derived["show_default"] = False
    return click.option(*(names or ["--" + field.replace("_", "-")]), field, **derived | more)


def _item_type(item: Any) -> click.ParamType:  # type: ignore[type-arg]
    return click.Choice(get_args(item)) if get_origin(item) is Literal else click.INT


def decode_options(command: F) -> F:
    """Add one option for each field of DecodeConfig, with its default and its help."""
    for field in reversed(settings(DecodeConfig)):
        name, default = "--" + field.name.replace("_", "-"), field.default
        kind: Any = NoneOr(click.INT) if default is None else type(default)
        more: dict[str, Any] = {"type": kind, "default": default}
        if field.name == "early_stopping":
            more = {"type": click.Choice(["true", "false", "never"]), "default": "false", "callback": _early_stopping}
        elif field.name == "bad_words_ids":
            more = {"type": CommaList(click.INT), "multiple": True, "show_default": False, "callback": _without_empty}
        elif field.name in _BY_NAME:
            more = {"type": NoneOr(Token())}
        elif field.name in ("forced_eos_token_id", "eos_token_id"):
            more = {"type": NoneOr(CommaList(click.INT))}
        elif field.name == "max_time":
            more = {"type": NoneOr(click.FLOAT)}
        elif field.name == "stop_strings":
            more = {"multiple": True, "show_default": False, "callback": _without_empty}
        elif kind is tuple:
            more = {"type": CommaList(click.INT), "default": default, "show_default": False}
        elif kind is bool:
            name += f"/--no-{name.removeprefix('--')}"
        command = click.option(name, help=field.help, **more)(command)
    return command


def token_ids(options: dict[str, Any], target_id: Callable[[str], int] | None) -> dict[str, Any]:
    """Return options with the ids of tokens that were given by name.

    Args:
        options: of decoding.
        target_id: tells the id of a token; None where there is no tokenizer.

    Raises:
        InputError: there is no such token, or no tokenizer.
    """
    named = {name: value for name in _BY_NAME if isinstance(value := options.get(name), str)}
    if named and target_id is None:
        raise InputError(f"{', '.join(named)}: there is no tokenizer that knows tokens by name; give ids")
    return {**options, **{name: target_id(value) for name, value in named.items() if target_id}}


def is_given(name: str) -> bool:
    """Say whether an option of the running command was given, and does not only have its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _without_empty(_context: click.Context, _parameter: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop what is empty: given alone it takes back what a bundle brings."""
    return tuple(value for value in values if value)


def _early_stopping(_context: click.Context, _parameter: click.Parameter, value: str) -> bool | str:
    return {"true": True, "false": False}.get(value, value)


def text_options(command: F) -> F:
    """Add the arguments and options of every command that reads texts and runs a bundle."""
    return _text_options(
        command,
        click.option("--input", "source", type=INPUT, help="File with one text a line; - is standard input."),
        click.option("--output", type=PATH, help="File to write, whole or not at all; by default standard output."),
    )


def bulk_options(command: F) -> F:
    """Add the same for files of any size and format, with their columns."""
    for add in (
        click.option(
            "--output-column",
            help="Column of the outputs; further columns begin with its name.  [default: output]",
        ),
        click.option("--input-column", help="Column of the texts; by default the only one, or the one named text."),
    ):
        command = add(command)
    return _text_options(
        command,
        click.option(
            "--input",
            "source",
            type=PathOrUri(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path),
            help="File with one text a line (- is standard input), or .parquet, .jsonl, .csv, .tsv or .txt, also s3://….",
        ),
        click.option(
            "--output",
            type=PathOrUri(path_type=Path),
            help="File to write, whole or not at all; by default standard output. Formats as for --input.",
        ),
    )


def _text_options(command: F, source: Callable[[F], F], output: Callable[[F], F]) -> F:
    batch_size = click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Texts in a batch.")
    texts = click.argument("texts", nargs=-1, metavar="[TEXT]...")
    for add in (batch_size, loading_options, output, source, texts, click.argument("bundle", type=PATH)):
        command = add(command)
    return command
