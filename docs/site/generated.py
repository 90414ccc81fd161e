"""A hook of MkDocs that fills reference pages from the code.

`<!-- settings: MODULE:CLASS -->` becomes a table of a configuration's fields, `<!-- own settings: MODULE:CLASS -->` one
without those of its base classes, `<!-- http -->` the endpoints and the schemas of the server, `<!-- commands -->` the
help of every command, `<!-- layouts -->` the built-in layouts, `<!-- switches -->` the values of the switches,
`<!-- presets -->` the sizes of the presets, `<!-- packages -->` the packages, and `<!-- metrics -->` the metrics of the
server.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import tfexport
from tfexport.cli import main
from tfexport.config import Ge, Gt, Le, Lt, Setting, settings
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.nn.presets import PRESETS, preset
from tfexport.nn.switches import SWITCHES
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig
from tfexport.serve.metrics import Metrics

SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page."""
    markdown = re.sub(r"<!-- (own )?settings: (\S+):(\S+) -->", lambda mark: _settings(*mark.groups()), markdown)
    for lines in (_commands, _http, _layouts, _switches, _presets, _packages, _metrics):
        mark = f"<!-- {lines.__name__[1:]} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    return markdown


def _settings(own: str | None, module: str, name: str) -> str:
    kind = getattr(importlib.import_module(module), name)
    rows = [_row(one) for one in settings(kind) if not own or one.name in kind.__annotations__]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def _row(one: Setting) -> str:
    kinds = " or ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in one.types)
    kinds = re.sub(r"Annotated\[([^,]+), [^]]*\]", r"\1", kinds.replace("NoneType", "None"))
    kinds = re.sub(r"\b(?:\w+\.)+(?=\w)", "", kinds)
    kinds = re.sub(r"Literal\[([^]]*)]", lambda found: found[1].replace("'", "`"), kinds)
    bounds = ", ".join(f"{SIGNS[type(bound)]} {bound.limit:,}" for bound in one.bounds)
    default = "required" if one.default is dataclasses.MISSING else f"`{one.default!r}`"
    return f"| `{one.name}` | {kinds}{', ' if bounds else ''}{bounds} | {default} | {one.help} |"


def _commands() -> Iterator[str]:
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"tfexport {name}", terminal_width=100)
        yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"


def _layouts() -> Iterator[str]:
    yield "| name | code and particulars |\n|---|---|"
    for name, layout in sorted(builtin_layouts().items()):
        yield f"| `{name}` | {layout.about} |"


def _switches() -> Iterator[str]:
    yield "| switch | values | default |\n|---|---|---|"
    for name, switch in SWITCHES.items():
        values = switch.values.__name__ if isinstance(switch.values, type) else ", ".join(switch.values)
        yield f"| `{name}` | {values} | {'required' if switch.default is None else f'`{switch.default}`'} |"


def _presets() -> Iterator[str]:
    yield "| name | d_model | layers | heads | d_ff | vocabulary | lengths |\n|---|---|---|---|---|---|---|"
    for name in PRESETS:
        config = preset(name)
        sides = [side for side in (config.encoder, config.decoder) if side]
        layers = " + ".join(str(side.layers) for side in sides)
        vocabulary = " / ".join(str(size) for size in (config.source_vocab, config.target_vocab) if size)
        lengths = " / ".join(str(size) for size in (config.max_source_length, config.max_target_length) if size)
        sizes = (config.d_model, layers, sides[0].num_heads, sides[0].d_ff, vocabulary, lengths)
        yield f"| `{name}` | {' | '.join(map(str, sizes))} |"


def _packages() -> Iterator[str]:
    yield "| package or module | task |\n|---|---|"
    folder = Path(tfexport.__file__).parent
    for path in sorted([*folder.glob("*/__init__.py"), *folder.glob("[!_]*.py")]):
        name = path.parent.name if path.stem == "__init__" else path.stem
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield f"| `{name}` | {docstring.partition(chr(10))[0]} |"


def _metrics() -> Iterator[str]:
    yield "| metric | measures |\n|---|---|"
    for family in sorted(Metrics().registry.collect(), key=lambda family: family.name):
        yield f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.documentation} |"


def _http() -> Iterator[str]:
    api = build_app({}, HttpConfig(completions=True, translate=True)).openapi()
    yield "| endpoint | body | meaning |\n|---|---|---|"
    for path, methods in api["paths"].items():
        for method, about in methods.items():
            contents = about.get("requestBody", {}).get("content", {}).values()
            body = " or ".join(_type(content["schema"]) for content in contents)
            meaning = about.get("description", "").replace("\n", " ")
            yield f"| `{method.upper()} {path}` | {body} | {meaning} |"
    for name, schema in api["components"]["schemas"].items():
        yield f"\n### {name}\n\n{schema.get('description', '')}\n\n| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for key, value in schema.get("properties", {}).items():
            default = f"`{value['default']!r}`" if "default" in value else ""
            required = "required" if key in schema.get("required", ()) else default
            yield f"| `{key}` | {_type(value)} | {required} | {value.get('description', '')} |"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = str(schema.get("type", ""))
    return str(schema.get("title", kind)) if kind == "object" else kind
