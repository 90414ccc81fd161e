"""Apply a layout: a state dict of another implementation becomes configuration and tensors of the canonical model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tfexport.config import MAX_SIZE
from tfexport.errors import CheckpointError, raise_all
from tfexport.importing.layout.execute import Execution, LineUse, Pair, fits_names, pair_names, same
from tfexport.importing.layout.layout import SIDES, Layout, override
from tfexport.importing.layout.sizes import (
    bias_table,
    check_shapes,
    expected_shapes,
    read_config,
    read_heads,
    read_tokens,
)
from tfexport.importing.layout.unsupported import unsupported
from tfexport.nn.config import TransformerConfig
from tfexport.nn.meta import on_meta
from tfexport.nn.switches import Value
from tfexport.nn.transformer import Transformer

__all__ = ["Canonical", "LineUse", "apply_layout", "fits_names", "possible_heads"]

_MOST_HEADS = 64


@dataclass(frozen=True)
class Canonical:
    """A checkpoint in canonical form.

    `tensors` has every canonical name, tied ones under each of theirs, in the
    dtype of the checkpoint. `lines` says which line of the layout took which keys
    and made which tensors, `notes` what is in none of them.
    """

    config: TransformerConfig
    tensors: dict[str, Tensor]
    lines: tuple[LineUse, ...]
    notes: tuple[str, ...] = ()

    def model(self) -> Transformer:
        """Make the model, in eval mode; it shares the tensors and keeps their dtypes."""
        with on_meta():
            model = Transformer(self.config)
        model.load_state_dict(self.tensors, assign=True)
        model._tie()
        return model.eval()


def apply_layout(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    *,
    heads: int | None = None,
    settings: Mapping[str, Value] | None = None,
    attributes: Mapping[str, Tensor] | None = None,
) -> Canonical:
    """Map a state dict to the canonical model, strictly both ways.

    Args:
        layout: which key becomes what, and the switches.
        tensors: the state dict; not changed, and its values not read before all names and shapes fit.
        heads: attention heads, which no shape tells; None where the layout or `settings` has `num_heads`.
        settings: switches and tokens in place of the layout's, see `override`.
        attributes: tensors outside of the state dict, for `derive: attr`.

    Raises:
        CheckpointError: lists every line without a key, key without a line or with two, tensor that is missing,
            superfluous, wrongly shaped or contradictory, tie that does not hold, size that is not given, and weights
            that are not finite.
        ConfigError: lists every setting that is unknown or has a wrong value.
    """
    layout = override(layout, {**(settings or {}), **({} if heads is None else {"num_heads": heads})})
    problems: list[str] = []
    execution = Execution(layout, pair_names(layout, list(tensors), problems), attributes or {})
    # Said only where names do not fit: an ignored buffer may have any name.
    problems += unsupported(tensors) if problems else []
    problems += _source_problems(layout, tensors, execution.pairs)
    sizes, config, filled = _sizes(layout, tensors, execution, problems)
    # What is wrong on both sides alike is said once.
    raise_all(CheckpointError, f"layout {layout.name}", list(dict.fromkeys(problems)))
    assert config is not None
    made = execution.run(tensors, sizes, _said_length(layout), problems)
    raise_all(CheckpointError, f"layout {layout.name}", problems or _not_finite(made, execution))
    made |= {name: made["enc.embed.weight"].new_zeros(shape) for name, shape in filled.items()}
    notes = (f"{len(filled)} biases that the checkpoint has not are 0, {next(iter(filled))} first",) if filled else ()
    complete = {name: made[name].contiguous() for name in expected_shapes(config)}
    return Canonical(_with_ties(config, complete), complete, tuple(execution.uses), notes)


def _source_problems(layout: Layout, tensors: Mapping[str, Tensor], pairs: Sequence[Pair]) -> list[str]:
    used = {key for pair in pairs for key in pair.sources}
    problems = [
        f"key {key[:120]} holds {str(tensor.dtype).removeprefix('torch.')}, expected floating point"
        for key, tensor in tensors.items()
        if key in used and not tensor.is_floating_point()
    ]
    for keys in layout.assert_tied:
        there = [key for key in keys if key in tensors]
        problems += [
            f"{there[0]} and {other} differ, but the layout says that they are tied"
            for other in there[1:]
            if not same(tensors[there[0]], tensors[other])
        ]
    return problems


def _sizes(
    layout: Layout, tensors: Mapping[str, Tensor], execution: Execution, problems: list[str]
) -> tuple[dict[str, dict[str, float]], TransformerConfig | None, dict[str, tuple[int, ...]]]:
    """Find all sizes by running the layout without values, on the device "meta".

    Returns:
        Sizes by name for each side, the configuration, and the biases to fill.
    """
    sizes, made = _made(layout, tensors, execution, problems)
    if not made:
        return {}, None, {}
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    for side in SIDES:
        query = made.get(f"{side}.layers.0.self.q.weight")
        if query is not None:
            bias = bias_table(shapes, side)
            told = None if bias is None else bias[-1]
            heads = read_heads(layout.switch("num_heads", side) or told, query.shape[0], problems)
            sizes[side] |= {"num_heads": heads, "d_k": query.shape[0] // heads}
    config = read_config(layout, shapes, sizes, problems)
    filled = check_shapes(config, shapes, problems) if config is not None else {}
    return sizes, config, filled


def _made(
    layout: Layout, tensors: Mapping[str, Tensor], execution: Execution, problems: list[str]
) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Make the canonical tensors without values; returns what is known of the sizes of each side too."""
    meta = {key: tensor.to("meta") for key, tensor in tensors.items()}
    names: dict[str, float] = {"d_model": 1.0, "num_heads": 1.0, "d_k": 1.0, **read_tokens(layout)}
    width = execution.width(meta, names, problems)
    if width is None:
        return {}, {}
    sizes = {side: {**names, "d_model": float(width), "num_heads": _said_heads(layout, side)} for side in SIDES}
    return sizes, execution.run(meta, sizes, _said_length(layout), problems)


def possible_heads(
    layout: Layout, tensors: Mapping[str, Tensor], attributes: Mapping[str, Tensor] | None = None
) -> list[int]:
    """Return the numbers of heads that the shapes leave open; none where the names do not fit."""
    problems: list[str] = []
    execution = Execution(layout, pair_names(layout, list(tensors), problems), attributes or {})
    _, made = _made(override(layout, {"num_heads": 1}), tensors, execution, problems)
    rows = {name: tensor.shape[0] for name, tensor in made.items() if tensor.dim()}
    attentions = [
        name.removesuffix("q.weight") for name in rows if name.endswith((".self.q.weight", ".cross.q.weight"))
    ]
    is_turned = layout.switch("positions") == "rotary"
    return [
        heads
        for heads in range(1, _MOST_HEADS + 1 if attentions else 1)
        if all(_are_heads(heads, rows, attention, is_turned=is_turned) for attention in attentions)
    ]


def _are_heads(heads: int, rows: Mapping[str, int], attention: str, *, is_turned: bool) -> bool:
    """Say whether so many heads cut the rows of queries, keys and values of one attention into equal parts."""
    query = rows[f"{attention}q.weight"]
    key, value = (rows.get(f"{attention}{part}.weight", query) for part in "kv")
    if query % heads or (is_turned and query // heads % 2):
        return False
    width = query // heads
    if key % width or heads % (key // width) or value % (key // width):
        return False
    return rows.get(f"{attention}q_norm.weight", query) in (query, width)


def _said_heads(layout: Layout, side: str) -> float:
    value = layout.switch("num_heads", side)
    return float(value) if isinstance(value, int) and value > 0 else 1.0


def _said_length(layout: Layout) -> int:
    value = layout.switch("max_length")
    return value if isinstance(value, int) and 0 < value <= MAX_SIZE else 0


def _not_finite(made: Mapping[str, Tensor], execution: Execution) -> list[str]:
    origin = {target: pair.sources[0] for pair in execution.pairs for target in pair.targets}
    return [
        f"{origin.get(name, name)[:120]} holds NaN or infinity; take a checkpoint from before the training diverged"
        for name, tensor in made.items()
        if not tensor.isfinite().all()
    ]


def _with_ties(config: TransformerConfig, tensors: Mapping[str, Tensor]) -> TransformerConfig:
    """Say which tables are equal, so that they are stored once; equal values make that exact."""
    if config.decoder is None:
        return config
    table = tensors["dec.embed.weight"]
    return replace(
        config,
        tie_embeddings=same(tensors["enc.embed.weight"], table),
        tie_output=same(tensors["out.weight"], table),
    )
