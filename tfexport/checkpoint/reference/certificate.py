"""The certificate of an import: what the golden proves, and what it cannot tell.

Equal outputs prove nothing about what does not show in them. So everything the
import decided is changed in turn: every switch to each other value, every
tensor by a little noise. Where the error does not grow clearly, the golden is
blind, and the certificate says so.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tfexport.checkpoint.layout.apply import Canonical
from tfexport.checkpoint.layout.switches import configured, options
from tfexport.checkpoint.reference.compare import Comparator, check_fits, tolerance
from tfexport.checkpoint.reference.golden import Golden
from tfexport.models.config import TransformerConfig
from tfexport.models.switches import SWITCHES, Value
from tfexport.models.transformer import Transformer

# A change counts as seen when the error grows by this factor.
GROWTH = 20
# Float64 noise; below it a small error is not small by merit.
_FLOOR = 5e-15
_NOISE = 0.01
_LAYER = re.compile(r"\.layers\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A switch, and the other value of it that comes nearest to the golden."""

    value: Value
    nearest: Value
    error: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What an import can show for itself.

    `proven` says whether a golden was reproduced; without one the rest is
    empty. `error` and `tolerance` are relative to the largest absolute value.
    `switches` has the error under the next best value of each, `lines` the
    error that a hundredth of noise on any one tensor of a line makes, the
    smallest of its tensors. `texts` is how many recorded texts the tokenizer was
    compared with. `unverified` is what could be wrong unseen.
    """

    layout: str
    proven: bool
    error: float | None = None
    tolerance: float | None = None
    rows: int = 0
    switches: Mapping[str, Changed] = field(default_factory=dict)
    lines: Mapping[str, float] = field(default_factory=dict)
    texts: int = 0
    unverified: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values, figures in two digits."""
        found = dataclasses.asdict(self)
        found["lines"] = {line: _short(error) for line, error in self.lines.items()}
        found["switches"] = {
            name: {**changed, "error": _short(changed["error"])} for name, changed in found["switches"].items()
        }
        return {**found, "error": None if self.error is None else _short(self.error)}


def unproven(layout: str) -> Certificate:
    """Return the certificate of an import without a golden."""
    return Certificate(layout=layout, proven=False, unverified=("everything: there was no golden to compare with",))


def certify(canonical: Canonical, golden: Golden, layout: str, *, baseline: float = 0.0) -> Certificate:
    """Compare an import with its golden, then change everything in turn.

    Args:
        canonical: of the golden's state dict.
        golden: inputs and expected outputs.
        layout: its name.
        baseline: the error that the layout documents for its family.

    Returns:
        The certificate; `proven` is False where the error is above the tolerance.

    Raises:
        ParityError: the golden does not fit the model at all.
    """
    check_fits(canonical.config, golden)
    comparator = Comparator(canonical, golden)
    wanted = tolerance(golden, baseline)
    error = comparator.compare(canonical.config).worst
    blind = GROWTH * max(error, _FLOOR)
    switches: dict[str, Changed] = {}
    unverified = []
    for name, value, nearest, found in _switch_changes(canonical, golden, comparator):
        if name not in switches or found < switches[name].error:
            switches[name] = Changed(value=value, nearest=nearest, error=found)
    unverified += [
        f"{name}: {_spelled(changed.value)} is not told from {_spelled(changed.nearest)}"
        for name, changed in switches.items()
        if not changed.error >= blind
    ]
    tensors = _tensor_errors(canonical, comparator)
    unverified += [f"{name}: makes no difference" for name, found in tensors.items() if not found >= blind]
    lines = {
        use.line: _weakest([tensors.get(_kind(name), 0.0) for name in use.targets], blind) for use in canonical.lines
    }
    return Certificate(
        layout=layout,
        proven=error <= wanted,
        error=error,
        tolerance=wanted,
        rows=golden.source_ids.shape[0],
        switches=switches,
        lines=lines,
        unverified=tuple(unverified),
    )


def _switch_changes(
    canonical: Canonical, golden: Golden, comparator: Comparator
) -> Iterator[tuple[str, Value, Value, float]]:
    """Yield each switch, its value, another value and the error under that."""
    config = canonical.config
    for name, values in {**options(config), "num_heads": _heads(config)}.items():
        current = _values(config)[name]
        for value in values:
            changed = configured(config, {name: value})
            if _values(changed)[name] != current:
                yield name, current, value, comparator.compare(changed).worst
    yield "source mask", "kept", "dropped", Comparator(canonical, golden, mask_source=False).compare(config).worst
    for name in (name for name, value in config.switches().items() if value is True):
        without = configured(config, {name: False})
        names = _parameter_names(without)
        smaller = replace(canonical, config=without, tensors={n: t for n, t in canonical.tensors.items() if n in names})
        yield name, True, False, Comparator(smaller, golden).compare(without).worst
    for name, value, twice in _doubled(config):
        changed = configured(config, {name: twice})
        yield name, value, twice, Comparator(replace(canonical, config=changed), golden).compare(changed).worst
    if config.feed_forward == "glu":
        yield "gate", "linear", "activated", Comparator(_gates_swapped(canonical), golden).compare(config).worst


def _weakest(errors: Sequence[float], blind: float) -> float:
    """Return the smallest error that shows; what does not show is listed apart."""
    return min((error for error in errors if error >= blind), default=max(errors, default=0.0))


def _values(config: TransformerConfig) -> dict[str, Value]:
    """Return what a configuration says, in numbers that tensors have."""
    scale = config.attention_scale or config.d_k("encoder") ** -0.5
    return {**config.switches(), "attention_scale": scale, "num_heads": config.encoder.num_heads}


def _heads(config: TransformerConfig) -> tuple[int, ...]:
    """Return other numbers of heads for the same tensors; a relative bias leaves one only."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    if config.relative_bias != "none" or len({stack.num_heads for stack in stacks}) > 1:
        return ()
    widths = [n * stack.num_heads for stack in stacks for n in (stack.d_k, stack.d_v) if n] or [config.d_model]
    common = math.gcd(*widths)
    return tuple(n for n in range(1, min(common, 64) + 1) if common % n == 0)


def _doubled(config: TransformerConfig) -> Iterator[tuple[str, float, float]]:
    """Yield the numbers that no search goes through, and twice as much of each."""
    for name, switch in SWITCHES.items():
        acts = config.relative_bias != "none" or name != "relative_max_distance"
        if switch.values in (int, float) and not switch.search and acts:
            value = getattr(config, name)
            yield name, value, 2 * value


def _parameter_names(config: TransformerConfig) -> set[str]:
    with torch.device("meta"):
        return set(Transformer(config).state_dict())


def _gates_swapped(canonical: Canonical) -> Canonical:
    names = {"fc1": "gate", "gate": "fc1"}
    swapped = {
        re.sub(r"\.ffn\.(fc1|gate)\.", lambda found: f".ffn.{names[found[1]]}.", name): tensor
        for name, tensor in canonical.tensors.items()
    }
    return replace(canonical, tensors=swapped)


def _tensor_errors(canonical: Canonical, comparator: Comparator) -> dict[str, float]:
    """Disturb each kind of tensor, of all layers at once; returns the error by name with * for the layer."""
    parameters = dict(comparator.model.named_parameters())
    kinds: dict[str, list[Tensor]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault(_kind(name), []).append(parameter)
    errors = {}
    for kind, members in kinds.items():
        kept = [member.detach().clone() for member in members]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for member in members:
                size = float(member.std(correction=0)) or 1.0
                noise = torch.randn(member.shape, generator=generator, dtype=member.dtype)
                member.add_(noise, alpha=_NOISE * size)
        errors[kind] = comparator.compare(canonical.config).worst
        with torch.no_grad():
            for member, before in zip(members, kept, strict=True):
                member.copy_(before)
    return errors


def _kind(name: str) -> str:
    return _LAYER.sub(".layers.*.", name)


def _short(number: float) -> float:
    return float(f"{number:.1e}") if math.isfinite(number) else 1e308


def _spelled(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
