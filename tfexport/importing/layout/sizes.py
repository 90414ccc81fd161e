"""Build the configuration of a model from tensor shapes and a layout."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tfexport.contract import TokenIds
from tfexport.errors import ConfigError
from tfexport.importing.layout._grammar import evaluate
from tfexport.importing.layout.layout import REPLACEABLE, SIDES, Layout, override, parse_derived
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.switches import SWITCHES, Value
from tfexport.nn.transformer import Transformer, on_meta

Shape = tuple[int, ...]

# The canonical model has all biases of a kind or no bias of it. If a checkpoint has only some, the others are 0.
_BIASES = {
    "attention_bias": re.compile(r".*\.(self|cross)\.[qkvo]\.bias"),
    "feed_forward_bias": re.compile(r".*\.ffn\.\w+\.bias"),
    "norm_bias": re.compile(r"(?!enc\.front\.).*norm\d?\.bias"),
    "output_bias": re.compile(r"out\.bias"),
}
_LAYER = re.compile(r"(enc|dec)\.layers\.(\d+)\.")


def _heads(value: Value, query_rows: int, problems: list[str]) -> int:
    if isinstance(value, int) and value > 0 and query_rows % value == 0:
        return int(value)
    fitting = ", ".join(str(n) for n in range(1, min(query_rows, 128) + 1) if query_rows % n == 0)
    problems.append(
        f"the number of heads is missing, and shapes do not show it; give --heads, one of {fitting}"
        if value is None
        else f"num_heads is {value}, which does not divide {query_rows} rows of queries; expected one of {fitting}"
    )
    return 1


def _attention(layout: Layout, side: str) -> str:
    """Name the attention that has heads; a recurrent layer has only "cross"."""
    return "self" if layout.switch("mixer", side) == "attention" else "cross"


def _bias_table(shapes: Mapping[str, Shape], side: str) -> Shape | None:
    return shapes.get(f"{side}.rel_bias.weight", shapes.get(f"{side}.layers.0.rel_bias.weight"))


def read_tokens(layout: Layout) -> dict[str, int]:
    """Return the token ids of a layout by name; "bos" may be among them."""
    ids = {name: value for name, value in layout.tokens.items() if isinstance(value, int)}
    return ids | {name: ids[value] for name, value in layout.tokens.items() if isinstance(value, str)}


def read_config(
    layout: Layout, shapes: Mapping[str, Shape], sizes: Mapping[str, dict[str, float]], problems: list[str]
) -> TransformerConfig | None:
    """Build the configuration, or extend `problems`; set the heads in `sizes`."""
    for side in SIDES:
        if query := shapes.get(f"{side}.layers.0.{_attention(layout, side)}.q.weight"):
            bias_heads = (_bias_table(shapes, side) or (None,))[-1]
            heads = _heads(layout.switch("num_heads", side) or bias_heads, query[0], problems)
            sizes[side] |= {"num_heads": heads, "d_k": query[0] // heads}
    has_decoder = any(name.startswith("dec.") for name in shapes)
    before = len(problems)
    width = int(sizes["dec" if has_decoder else "enc"]["d_model"])
    values: dict[str, Any] = {
        "d_model": width,
        "source_vocab": shapes.get("enc.embed.weight", (0,))[0],
        "features": layout.features,
        "image": layout.image,
        "max_source_length": _length(layout, "enc", shapes, problems),
        "encoder": _stack(layout, "enc", shapes, sizes["enc"], problems, width),
        "decoder": None,
        "dropout": 0.0,
        "labels": tuple(f"LABEL_{number}" for number in range(shapes.get("head.weight", (0,))[0])),
        "tokens": _token_ids(layout, has_decoder, problems),
        **{flag: any(bias.fullmatch(name) for name in shapes) for flag, bias in _BIASES.items()},
    }
    if layout.image and shapes.get("enc.pos", (None,))[0] not in (None, count := layout.image.source.positions):
        problems.append(
            f"enc.pos is {list(shapes['enc.pos'])}, but an image has {count} patches and class tokens; correct its size"
        )
    if has_decoder:
        values["target_vocab"] = shapes.get("dec.embed.weight", (None,))[0]
        values["max_target_length"] = _length(layout, "dec", shapes, problems)
        values["decoder"] = _stack(layout, "dec", shapes, sizes["dec"], problems, width)
        if values["target_vocab"] is None:
            problems.append("dec.embed.weight is missing; map a key to it, or derive it")
    values |= _switches(layout, sizes["dec" if has_decoder else "enc"], problems)
    if (table := _bias_table(shapes, "enc")) is not None:
        values["relative_buckets"] = table[0]
    if len(problems) > before:
        return None
    try:
        return TransformerConfig(**values)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _switches(layout: Layout, sizes: Mapping[str, float], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, switch in SWITCHES.items():
        if switch.per_side:
            continue
        value = layout.switch(name)
        if value is None:
            problems.append(f"switch {name} is missing, and shapes do not show it; give --set {name}=…")
        else:
            found[name] = _value(name, value, sizes, problems)
    # None lets each side use its own d_k; a number would be the same for both.
    for name, usual in (("attention_scale", sizes["d_k"] ** -0.5), ("rotary_dim", sizes["d_k"])):
        if isinstance(layout.switch(name), str) and found[name] == usual:
            found[name] = None
    return found


def _value(name: str, value: Value, sizes: Mapping[str, float], problems: list[str]) -> Value:
    kind = SWITCHES[name].values
    return kind(_number(name, value, sizes, problems)) if kind in (int, float) else value


def _number(name: str, value: Value, sizes: Mapping[str, float], problems: list[str]) -> float:
    try:
        return evaluate(str(value), sizes)
    except ConfigError as error:
        problems.append(f"{name}: {error}")
        return 1.0


def _stack(
    layout: Layout, side: str, shapes: Mapping[str, Shape], sizes: Mapping[str, float], problems: list[str], width: int
) -> StackConfig | None:
    layers = {int(found[2]) for name in shapes if (found := _LAYER.match(name)) and found[1] == side}
    first = f"{side}.layers.0"
    attention = f"{first}.{_attention(layout, side)}"
    needed = (*(f"{attention}.{part}.weight" for part in "qkv"), f"{first}.ffn.fc1.weight")
    missing = [name for name in needed if len(shapes.get(name, ())) != 2]
    place = layout.switch("norm_place", side)
    if place is None:
        problems.append(f"switch norm_place of {side} is missing, and shapes do not show it; give --set norm_place=…")
    problems += [f"{name} is missing or not a matrix; map a key to it" for name in missing]
    if missing or place is None:
        return None
    heads, d_model = int(sizes["num_heads"]), int(sizes["d_model"])
    query, key, value = (shapes[f"{attention}.{part}.weight"][0] for part in "qkv")
    d_k = query // heads
    if key % d_k or heads % (kv_heads := key // d_k):
        problems.append(f"{side}: {key} rows of keys and {heads} heads of {query} rows of queries differ in width")
        return None
    d_v = value // kv_heads
    is_plain = d_k == d_v == d_model / heads
    own = {name: layout.arch[f"{side}.{name}"] for name in REPLACEABLE if f"{side}.{name}" in layout.arch}
    return StackConfig(
        layers=max(layers) + 1,
        num_heads=heads,
        d_ff=shapes[f"{first}.ffn.fc1.weight"][0],
        norm_place=place,  # type: ignore[arg-type]  # the layout has checked it
        final_norm=bool(layout.switch("final_norm", side)),
        residual_scale=_number("residual_scale", layout.switch("residual_scale", side), sizes, problems),
        parallel=layout.switch("parallel", side),  # type: ignore[arg-type]  # the layout has checked it
        mixer=layout.switch("mixer", side),  # type: ignore[arg-type]  # the layout has checked it
        d_k=None if is_plain else d_k,
        d_v=None if is_plain else d_v,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        d_model=None if d_model == width else d_model,
        **{name: _value(name, value, sizes, problems) for name, value in own.items()},  # type: ignore[arg-type]
    )


def _length(layout: Layout, side: str, shapes: Mapping[str, Shape], problems: list[str]) -> int:
    limit = layout.switch("max_length", side)
    if f"{side}.pos" in shapes:
        is_computed = any(parse_derived(text).kind == "sinusoid" for text in layout.derive.values())
        if limit is not None and layout.switch("positions") == "table" and not is_computed:
            problems.append(f"max_length is {limit}, but {side}.pos is stored; leave max_length out")
        return shapes[f"{side}.pos"][0]
    if isinstance(limit, int) and limit > 0:
        return limit
    if layout.switch("positions") != "table":
        problems.append(f"{side} has no position table that limits its length; give --set max_length=N")
    return 1


def _token_ids(layout: Layout, has_decoder: bool, problems: list[str]) -> TokenIds | None:
    ids = {name: value for name, value in read_tokens(layout).items() if name != "bos"}
    # An encoder-only model needs just a padding id, because nothing is decoded.
    needed = ("pad", "start", "eos") if has_decoder else ("pad",)
    if missing := [name for name in needed if name not in ids]:
        settings = " ".join(f"--set tokens.{name}=ID" for name in missing)
        problems.append(f"tokens {', '.join(missing)} are missing; give {settings}")
        return None
    return TokenIds(**{"start": ids["pad"], "eos": ids["pad"], **ids})


@functools.lru_cache(maxsize=32)
def expected_shapes(config: TransformerConfig) -> Mapping[str, Shape]:
    """Return the shape of every canonical tensor, tied ones under each name."""
    with on_meta():
        model = Transformer(replace(config, tie_embeddings=False, tie_output=False))
    return MappingProxyType({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})


def check_shapes(config: TransformerConfig, shapes: Mapping[str, Shape], problems: list[str]) -> dict[str, Shape]:
    """Compare shapes with `config`; return the missing biases, to fill with 0."""
    expected, filled = expected_shapes(config), dict[str, Shape]()
    for name, shape in expected.items():
        if name not in shapes and name.endswith(".bias"):
            filled[name] = shape
        elif name not in shapes:
            problems.append(f"missing {name} {list(shape)}")
        elif shapes[name] != shape:
            problems.append(f"{name} is {list(shapes[name])}, expected {list(shape)}")
    more = ((name, shape) for name, shape in shapes.items() if name not in expected)
    problems += [f"unexpected {name} {list(shape)}; the switches do not use it" for name, shape in more]
    return filled


Switches = Mapping[str, Value]


def options(config: TransformerConfig) -> dict[str, tuple[Value, ...]]:
    """Return the values to try for each switch; one side has `enc.NAME`."""
    bases = {name: name.rpartition(".")[2] for name in config.switches()}
    found = {name: SWITCHES[base].search for name, base in bases.items() if SWITCHES[base].search and config.uses(base)}
    # Kinds of positions without a tensor, possible if no tensor shows another kind.
    is_free = config.positions != "table" and config.relative_bias in ("none", "alibi")
    if is_free:
        found["positions"] = (config.positions, *({"none", "rotary"} - {config.positions}))
    if config.rotary_scaling == "none":  # the search tries others
        found.pop("rotary_scaling", None)
    if is_free or config.relative_bias == "alibi":
        found["relative_bias"] = ("none", "alibi")
    for name, place in config.switches().items():
        if place == "sandwich":
            found[name] = ("sandwich", "pre")
    # RMSNorm has no bias; a norm without a bias can be of any kind.
    centered = tuple(kind for kind in found["norm"] if kind != "rms")
    found["norm"] = centered if config.norm_bias else ("rms", *centered)
    # norm_eps changes the outputs least, so it comes last.
    found["norm_eps"] = found.pop("norm_eps")
    return found


def configured(config: TransformerConfig, switches: Switches) -> TransformerConfig:
    """Return a configuration of the same sizes with other switches, or "num_heads"."""
    changes: dict[str, Any] = {}
    names = {"d_model": float(config.d_model), "d_k": float(config.d_k("encoder"))}
    stacks: dict[str, Any] = {"enc": config.encoder, "dec": config.decoder}
    for name, value in switches.items():
        side, _, base = name.rpartition(".")
        if base == "num_heads":  # precedes attention_scale, which may depend on it
            assert isinstance(value, int)
            stacks = {one: stack and _with_heads(stack, value, config.d_model) for one, stack in stacks.items()}
            names["d_k"] = float(stacks["enc"].d_k)
        elif (switch := SWITCHES[base]).per_side:
            for one in (side,) if side else tuple(stacks):
                stacks[one] = stacks[one] and replace(stacks[one], **{base: value})
        elif isinstance(value, str) and switch.values in (int, float):
            changes[base] = switch.values(evaluate(value, names))
        else:
            changes[base] = value
    return replace(config, encoder=stacks["enc"], decoder=stacks["dec"], **changes)


def _with_heads(stack: StackConfig, heads: int, d_model: int) -> StackConfig:
    d_k, d_v = ((width or d_model // stack.num_heads) * stack.num_heads // heads for width in (stack.d_k, stack.d_v))
    kv_heads = stack.num_kv_heads and stack.num_kv_heads * heads // stack.num_heads
    return replace(stack, num_heads=heads, num_kv_heads=kv_heads, d_k=d_k, d_v=d_v)


def with_switches(layout: Layout, switches: Switches) -> Layout:
    """Return a layout with other switches, without those that equal the default."""
    # The values that a draft gives to one side are not searched.
    own = {name: value for name, value in layout.arch.items() if name.rpartition(".")[2] in REPLACEABLE and "." in name}
    layout = override(layout, switches)
    arch = {**layout.arch, **own}
    for name, switch in SWITCHES.items():
        sides = [f"{side}.{name}" for side in SIDES]
        of_sides = [arch[side] for side in sides if side in arch]
        if len(of_sides) == len(sides) and len(set(of_sides)) == 1:
            arch = {key: value for key, value in arch.items() if key not in sides} | {name: of_sides[0]}
        for one in (name, *(sides if name not in arch else ())):
            if one in arch and arch[one] == switch.default:
                del arch[one]
    return replace(layout, arch=arch)
