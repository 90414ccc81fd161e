"""Read and check layouts: YAML files as in docs/reference/layouts.md."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml

from tfexport._io.strict_json import MAX_CONFIG_BYTES, plain_problem
from tfexport.config import Config, Ge, Lt, Match, TokenId
from tfexport.errors import ConfigError, shortened
from tfexport.importing.layout._grammar import Rule, names_in
from tfexport.importing.layout.ops import OPERATIONS, SINUSOIDS, Step, parse_step
from tfexport.nn.config import FeaturesConfig, ImageConfig
from tfexport.nn.switches import SWITCHES, Switch, Value

VERSION = 1
SIDES = ("enc", "dec")
_MAX_LINES = 1_000
_MAX_DEPTH = 20  # of brackets, for which PyYAML needs quadratic time
_MAX_SETTING = 200
_CANONICAL = re.compile(
    r"(enc|dec)\.(embed\.weight|pos|rel_bias\.weight|(emb_norm|norm)\.(weight|bias)"
    r"|layers\.\d+\.((self\.([qkvo]|[qk]_norm)|(post_)?norm[123]|ffn\.(fc1|fc2|gate))\.(weight|bias)|rel_bias\.weight))"
    r"|dec\.layers\.\d+\.(cross\.([qkvo]|[qk]_norm)|self\.(forget|update|input|ffn\.(fc1|fc2|gate)))\.(weight|bias)|(out|head)\.(weight|bias)"
    r"|enc\.front\.((layers\.\d+\.(conv|norm)|proj|conv)\.(weight|bias)|tokens)"
    r"|enc\.proj\.(weight|bias)"
)
_TOKENS = ("unk", "pad", "bos", "eos", "start")
# Switches that are not per side, but that a side can replace.
REPLACEABLE = ("embedding_scale", "embedding_norm", "norm_eps", "activation", "feed_forward")
# The keys of `arch`: the switches of the canonical model, and two sizes.
ARCH_SWITCHES: dict[str, Switch] = {
    **SWITCHES,
    "num_heads": Switch(values=int, acts="attention", per_side=True),
    "max_length": Switch(values=int, acts="positions", per_side=True),
}
_OF_SIDES = (*REPLACEABLE, *(name for name, switch in ARCH_SWITCHES.items() if switch.per_side))


class Line(NamedTuple):
    """A parsed line of `map` or `post`; if it is optional, it may match no key."""

    rule: Rule
    steps: tuple[Step, ...]
    optional: bool


class Derived(NamedTuple):
    """A parsed line of `derive`; the kind is "tie", "sinusoid", "attr" or "ones"."""

    kind: str
    argument: str
    steps: tuple[Step, ...]


class Layout(Config, subject="layout"):
    """A mapping from the state dict of one implementation to the canonical model.

    Switches of one side have the names "enc.NAME" and "dec.NAME" in `arch`. An encoder that reads `features` or an
    `image` has no table of embeddings. `baseline` is the relative error of the original in float64, if it computes
    parts in float32.
    """

    name: Annotated[str, Match(r"[\w.-]{1,80}", "1 to 80 letters, digits, _, - and .")]
    about: str = ""
    arch: Mapping[str, Value] = field(default_factory=dict)
    features: FeaturesConfig | None = None
    image: ImageConfig | None = None
    tokens: Mapping[str, TokenId | str] = field(default_factory=dict)
    map: tuple[str, ...]
    derive: Mapping[str, str] = field(default_factory=dict)
    post: tuple[str, ...] = ()
    assert_tied: tuple[tuple[str, ...], ...] = ()
    ignore: tuple[str, ...] = ()
    baseline: Annotated[float, Ge(0), Lt(1e-3)] = 0.0

    def switch(self, name: str, side: str = "") -> Value:
        """Return a switch as written, for one side if it has its own, or its default."""
        return self.arch.get(f"{side}.{name}", self.arch.get(name, ARCH_SWITCHES[name].default))

    def _problems(self) -> Iterator[str]:
        if not 0 < len(self.map) <= _MAX_LINES:
            yield f"map has {len(self.map)} lines, expected 1 to {_MAX_LINES}"
        for target in self.derive:
            if not _CANONICAL.fullmatch(target.replace("{i}", "0", 1)):
                yield f"derive {target}: no canonical name"
        yield from _line_problems("map", parse_line, enumerate(self.map, 1))
        yield from _line_problems("post", parse_post, enumerate(self.post, 1))
        yield from _line_problems("derive", parse_derived, self.derive.items())
        for name, value in self.arch.items():
            yield from _switch_problems(name, value)
        for name, token in self.tokens.items():
            if name not in _TOKENS:
                yield f"token {name[:80]} is unknown, expected one of {', '.join(_TOKENS)}"
            elif isinstance(token, str) and (token == name or not isinstance(self.tokens.get(token), int)):
                yield f"tokens.{name} is {shortened(token)}, expected an id or a token that has one"
        for keys in self.assert_tied:
            if len(keys) < 2:
                yield f"assert_tied has {shortened(list(keys))}, expected at least two keys"

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        # A file has the version, and the switches of one side below "enc" and "dec".
        version = data.get("layout")
        if version != VERSION or isinstance(version, bool):
            raise ConfigError(f"layout is {shortened(version)}, expected the version {VERSION}")
        data = {key: value for key, value in data.items() if key != "layout"}
        if isinstance(arch := data.get("arch"), dict):
            sides = {side: arch[side] for side in SIDES if isinstance(arch.get(side), dict)}
            inner = {f"{side}.{name}": value for side, switches in sides.items() for name, value in switches.items()}
            data["arch"] = {name: value for name, value in arch.items() if name not in sides} | inner
        return data


@lru_cache(maxsize=20_000)
def parse_line(text: str) -> Line:
    """Parse a line of `map`."""
    sides = re.fullmatch(r"\s*(\S+)\s+->(\??)\s+(\S+)\s*(\|>.*)?", text)
    if sides is None:
        raise ConfigError("expected 'SRC -> DST' and folds, each after |>")
    rule = Rule(sides[1], sides[3])
    steps = tuple(parse_step(step) for step in (sides[4] or "").split("|>")[1:])
    if wrong := sorted(name for name in rule.targets() if not _CANONICAL.fullmatch(name)):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{', '.join(wrong[:3])}{more}: no canonical name; docs/reference/layouts.md lists them")
    shapes = [OPERATIONS[step.name].shape for step in steps]
    if shapes.count("splits") != rule.splits:
        raise ConfigError("[…/…] on the right and one fold that splits need each other")
    if [place for place, shape in enumerate(shapes) if shape == "joins"] != [0] * rule.joins:
        raise ConfigError("{h} or {a|b} on the left and join_rows or join_columns as the first fold need each other")
    return Line(rule, steps, bool(sides[2]))


@cache
def parse_derived(text: str) -> Derived:
    """Parse the right side of a line of `derive`."""
    first, *rest = text.split("|>")
    kind, _, argument = first.strip().partition(" ")
    argument = argument.strip()
    pattern = {"tie": _CANONICAL.pattern, "sinusoid": "|".join(SINUSOIDS), "attr": r"\w+(\.\w+)*", "ones": ""}.get(kind)
    if pattern is None or not re.fullmatch(pattern, argument):
        kinds = f"tie NAME, sinusoid {' or '.join(SINUSOIDS)}, attr path.to.it, ones"
        raise ConfigError(f"{first.strip()!r} is none of {kinds}")
    return Derived(kind, argument, tuple(parse_step(step) for step in rest))


@cache
def parse_post(text: str) -> Line:
    """Parse a line of `post`, which reads and writes the same tensors."""
    target, _, steps = text.strip().partition(" ")
    if not steps:
        raise ConfigError("expected 'DST |> fold'")
    line = parse_line(f"{target} -> {target} {steps}")
    if line.rule.splits or line.rule.joins:
        raise ConfigError("changes tensors one by one: no [q/k/v], no {h}")
    return line


def _line_problems(kind: str, parse: Callable[[str], object], lines: Iterable[tuple[object, str]]) -> Iterator[str]:
    for place, text in lines:
        try:
            parse(text)
        except ConfigError as error:
            yield f"{kind} {place} {shortened(text)}: {error}"


def _switch_problems(name: str, value: Value) -> Iterator[str]:
    side, _, base = name.rpartition(".")
    if base not in ARCH_SWITCHES or (side and (side not in SIDES or base not in _OF_SIDES)):
        names, sides = ", ".join(ARCH_SWITCHES), ", ".join(_OF_SIDES)
        yield f"switch {name[:80]} is unknown, expected one of {names}; below enc and dec: {sides}"
        return
    values = ARCH_SWITCHES[base].values
    if base not in SWITCHES:
        is_valid, expected = type(value) is int and value > 0, "a whole number, 1 or more"
    elif isinstance(values, tuple):
        is_valid, expected = value in values, " or ".join(values)
    elif values is bool:
        is_valid, expected = isinstance(value, bool), "true or false"
    elif isinstance(value, str):
        try:
            unknown = names_in(value) - {"d_model", "num_heads", "d_k"}
        except ConfigError as error:
            yield f"{name}: {error}"
            return
        is_valid, expected = not unknown, "arithmetic in d_model, num_heads and d_k"
    else:
        is_valid, expected = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not is_valid:
        yield f"{name} is {shortened(value)}, expected {expected}"


def parse_setting(text: str) -> tuple[str, Value]:
    """Parse a KEY=VALUE text; the value is YAML, as in a layout file."""
    key, equals, written = text.partition("=")
    try:
        value = yaml.safe_load(written) if len(written) <= _MAX_SETTING else {}
    except yaml.YAMLError:
        value = {}
    if not equals or not key or not isinstance(value, bool | int | float | str | None):
        raise ConfigError(f"setting {shortened(text)}: expected KEY=VALUE, such as norm_eps=1e-6 or tokens.pad=0")
    return key.strip(), value


def setting_problems(settings: Mapping[str, Value]) -> Iterator[str]:
    """Describe the settings that fit no layout, with the names or values that do."""
    for name, value in settings.items():
        kind, _, token = name.partition(".")
        if kind != "tokens":
            yield from _switch_problems(name, value)
        elif token not in _TOKENS:
            yield f"token {token[:80]} is unknown, expected one of {', '.join(_TOKENS)}"
        elif not (type(value) is int and value >= 0) and value not in {*_TOKENS} - {token}:
            others = ", ".join(other for other in _TOKENS if other != token)
            yield f"{name} is {shortened(value)}, expected an id, 0 or more, or another token: {others}"


def override(layout: Layout, settings: Mapping[str, Value]) -> Layout:
    """Return a copy of a layout with other switches and tokens, such as "tokens.pad".

    A switch for both sides also replaces the layout's values for single sides.
    """
    arch, tokens = dict(layout.arch), dict(layout.tokens)
    for name, value in settings.items():
        kind, _, token = name.partition(".")
        if kind == "tokens":
            tokens[token] = value  # type: ignore[assignment]  # checked by Layout
        else:
            for side in SIDES:
                arch.pop(f"{side}.{name}", None)
            arch[name] = value
    return replace(layout, arch=arch, tokens=tokens)


class _Loader(yaml.SafeLoader):
    """Load plain data only: no objects, references, duplicate keys or deep nesting."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803, as in PyYAML
        if self.flow_level == _MAX_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has a reference (*name), which layouts may not have")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not all(isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:str" for key, _ in node.value):
            raise yaml.YAMLError("it has a key that is not a string")
        keys = sorted(key.value for key, _ in node.value)
        if twice := {one for one, other in pairwise(keys) if one == other}:
            raise yaml.YAMLError(f"{', '.join(sorted(twice))[:200]} is given twice")
        return super().construct_mapping(node, deep)


def parse_layout(text: str, name: str) -> Layout:
    """Parse the YAML of a layout file; `name` is used in error messages."""
    return Layout.from_dict(parse_yaml(text, name), subject=name)


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML of at most 1 MiB whose keys are strings; errors begin with `name`."""
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name}: has {len(text)} characters, the limit is {MAX_CONFIG_BYTES}")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506, stricter than SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is not valid YAML: {' '.join(str(error).split())[:300]}") from error


def render_layout(layout: Layout) -> str:
    """Return a layout as YAML."""
    arch: dict[str, Any] = {}
    for name, value in layout.arch.items():
        side, _, base = name.rpartition(".")
        (arch.setdefault(side, {}) if side else arch)[base] = value
    data = {"layout": VERSION, **{key: value for key, value in layout.to_dict().items() if value}}
    if arch:
        data["arch"] = arch
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def read_layout(path: Path) -> Layout:
    """Read a layout file of at most 1 MiB."""
    try:
        if problem := plain_problem(path):
            raise ConfigError(f"{path}: {problem}; give the name of a built-in layout or a layout file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size} bytes, the limit is {MAX_CONFIG_BYTES}")
        return parse_layout(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8; save it again as text") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error


@cache
def builtin_layouts() -> Mapping[str, Layout]:
    """Return the layouts that come with tfexport, by name."""
    files = sorted((Path(__file__).parent / "layouts").glob("*.yaml"))
    layouts = [parse_layout(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {layout.name: layout for layout in layouts}
