"""Certify an import: what reference outputs prove, and what they cannot detect.

Equal outputs prove nothing about parts that do not change them. Therefore, every switch is set to each other value, and
every tensor gets a little noise. If the error does not grow clearly, the certificate lists the part as unverified.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfexport import _html
from tfexport._io.sealed_directory import FileEntry
from tfexport.bundle.status import REFERENCE, Proof, proof_of
from tfexport.errors import ConfigError
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.layout.sizes import configured, options
from tfexport.importing.reference.compare import (
    Comparator,
    Comparison,
    check_fits,
    compare_lengths,
    fitting_rows,
    tolerance,
)
from tfexport.importing.reference.lengths import LongRow
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.config import TransformerConfig
from tfexport.nn.switches import SWITCHES, Value
from tfexport.nn.transformer import Transformer, on_meta

GROWTH = 20  # a change counts as detected if the error grows by this factor
_FLOOR = 5e-15  # rounding noise of float64
_NOISE = 0.01
_PROBE = 256  # length of the row that switches without effect on short rows are tried on


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A switch value, and the other value that is closest to the reference outputs."""

    value: Value
    nearest: Value
    error: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Proof of an import; without reference outputs, most fields are empty."""

    layout: str
    proven: bool  # the model reproduces the reference outputs
    error: float | None = None  # largest difference, relative to the largest absolute value
    tolerance: float | None = None
    author: str = REFERENCE  # what the outputs were compared with
    author_version: str | None = None  # of that code, as far as known
    rows: int = 0  # of the reference batch
    source_tokens: int = 0  # length of the longest source that was compared
    target_tokens: int = 0
    switches: Mapping[str, Changed] = field(default_factory=dict, repr=False)  # error with the next best value
    # Smallest error that 1% of noise on one tensor causes, by layout line.
    lines: Mapping[str, float] = field(default_factory=dict, repr=False)
    texts: int = field(default=0, repr=False)  # number of recorded texts that the tokenizer was compared with
    unverified: tuple[str, ...] = ()  # possible mistakes that the reference outputs cannot show
    tensors: Mapping[str, str] = field(default_factory=dict, repr=False)  # use of each tensor of the checkpoint
    checkpoint: Mapping[str, FileEntry] = field(default_factory=dict, repr=False)  # by name of the weight file
    origin: Mapping[str, str] = field(default_factory=dict, repr=False)  # see `Provenance`
    reference: FileEntry | None = field(default=None, repr=False)
    model: Mapping[str, FileEntry] = field(default_factory=dict, repr=False)  # files of the model directory

    @property
    def proof(self) -> Proof:
        """What the outputs were compared with."""
        return proof_of(None if self.error is None else self.proven, self.author)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values, with two digits of each error."""
        found = self.proof.to_dict() | dataclasses.asdict(self)
        found["lines"] = {line: _short(error) for line, error in self.lines.items()}
        found["switches"] = {
            name: {**changed, "error": _short(changed["error"])} for name, changed in found["switches"].items()
        }
        return {**found, "error": None if self.error is None else _short(self.error)}

    def _repr_html_(self) -> str:
        result = "not compared" if self.error is None else f"{self.error:.1e} ≤ {self.tolerance:.1e}"
        rows = [("reference outputs", result, "✓" if self.proven else "✗")]
        for name, one in self.switches.items():
            if not any(part.startswith(f"{name}:") for part in self.unverified):
                rows.append((name, f"{one.value} (error with {one.nearest}: {one.error:.1e})", "✓"))
        rows += [("unverified", part, "·") for part in self.unverified]
        return _html.table(("part", "result", ""), rows, f"certificate of {self.layout}")


def certify(
    canonical: Canonical,
    reference: ReferenceOutputs,
    layout: str,
    *,
    baseline: float = 0.0,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Certificate:
    """Compare a recorded state dict with its outputs, then change each part in turn."""
    check_fits(canonical.config, reference)
    comparator = Comparator(canonical, reference)
    wanted = tolerance(reference, baseline)
    error = comparator.compare(canonical.config).worst
    source_tokens, target_tokens = compare_lengths(comparator, canonical, reference, error, wanted)
    # A switch that changes nothing in short rows, such as the largest distance of a bias, may change a long one.
    rows = fitting_rows(canonical.config, reference)
    probe = [row for row in rows if max(row.lengths) >= _PROBE][:1] or rows[-1:]
    blind = GROWTH * max(error, _FLOOR, *(comparator.compare_row(canonical.config, row) for row in probe))
    changes = list(_switch_changes(canonical, reference, comparator))
    kinds: dict[str, list[Tensor]] = {}
    for name, parameter in comparator.model.named_parameters():
        kinds.setdefault(_kind(name), []).append(parameter)
    num_changes = len(changes) + len(kinds)
    switches: dict[str, Changed] = {}
    for done, (name, value, nearest, run) in enumerate(changes, 1):
        found = run().worst
        if probe and not found >= blind:
            found = run(rows=probe).worst
        on_progress(done / num_changes)
        if name not in switches or found < switches[name].error:
            switches[name] = Changed(value=value, nearest=nearest, error=found)
    tensors: dict[str, float] = {}
    for done, (kind, members) in enumerate(kinds.items(), len(changes) + 1):
        tensors[kind] = _disturbed(members, comparator, canonical.config)
        on_progress(done / num_changes)
    unverified = [
        f"{name}: {_spelled(changed.value)} and {_spelled(changed.nearest)} give the same outputs"
        for name, changed in switches.items()
        if not changed.error >= blind
    ]
    unverified += [f"{name}: makes no difference" for name, found in tensors.items() if not found >= blind]
    unverified += uncompared(canonical.config, source_tokens, target_tokens)
    unverified += [f"longer rows: {reference.long_error}"] if reference.long_error else []
    lines = {}
    for use in canonical.lines:
        errors = [tensors.get(_kind(name), 0.0) for name in use.targets]
        lines[use.line] = min((found for found in errors if found >= blind), default=max(errors, default=0.0))
    return Certificate(
        layout=layout,
        proven=error <= wanted,
        error=error,
        tolerance=wanted,
        rows=reference.source_ids.shape[0] + len(rows),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        switches=switches,
        lines=lines,
        unverified=tuple(unverified),
    )


def uncompared(config: TransformerConfig, source_tokens: int, target_tokens: int) -> list[str]:
    """List the sides that were compared with shorter texts than the model accepts."""
    sides = (("source", config.max_source_length, source_tokens), ("target", config.max_target_length, target_tokens))
    return [
        f"{side} length: compared up to {compared} tokens, the model accepts {most}"
        for side, most, compared in sides
        if most is not None and compared < most
    ]


def _switch_changes(
    canonical: Canonical, reference: ReferenceOutputs, comparator: Comparator
) -> Iterator[tuple[str, Value, Value, Callable[..., Comparison]]]:
    config, current = canonical.config, _values(canonical.config)

    def compare(*, rows: Sequence[LongRow] = (), **changes: Any) -> Comparison:
        other = replace(canonical, **changes)
        return Comparator(other, reference).compare(other.config, rows=rows)

    for name, values in {**options(config), "num_heads": _heads(config)}.items():
        for value in values:
            try:
                changed = configured(config, {name: value})
            except ConfigError:  # it does not fit the sizes
                continue
            if _values(changed)[name] != current[name]:
                yield name, current[name], value, partial(comparator.compare, changed)
    yield "source mask", "kept", "dropped", partial(comparator.compare, config, mask_source=False)
    for name, value in config.switches().items():
        switch = SWITCHES[name.rpartition(".")[2]]
        if switch.search or not config.uses(name.rpartition(".")[2]):
            continue
        if switch.values in (int, float):
            assert isinstance(value, int | float)
            yield name, value, 2 * value, partial(compare, config=configured(config, {name: 2 * value}))
        elif switch.default not in (None, value):
            without = configured(config, {name: switch.default})
            with on_meta():
                names = set(Transformer(without).state_dict())
            if names <= canonical.tensors.keys():
                tensors = {name: canonical.tensors[name] for name in names}
                yield name, value, switch.default, partial(compare, config=without, tensors=tensors)
    if config.feed_forward == "glu":
        swap = partial(re.sub, r"(?<=\.ffn\.)(fc1|gate)(?=\.)", lambda found: {"fc1": "gate", "gate": "fc1"}[found[0]])
        swapped = {swap(name): tensor for name, tensor in canonical.tensors.items()}
        yield "gate", "linear", "activated", partial(compare, tensors=swapped)


def _values(config: TransformerConfig) -> dict[str, Value]:
    return {
        **config.switches(),
        "attention_scale": config.attention_scale or config.d_k("encoder") ** -0.5,
        "rotary_dim": config.rotary_dim or config.d_k("encoder"),
        "num_heads": config.encoder.num_heads,
    }


def _heads(config: TransformerConfig) -> tuple[int, ...]:
    """Return the head counts that fit the tensors; empty if a tensor decides."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    has_tensor = config.relative_bias not in ("none", "alibi") or config.qk_norm == "head"
    if has_tensor or len({stack.num_heads for stack in stacks}) > 1:
        return ()
    widths = [n * stack.num_heads for stack in stacks for n in (stack.d_k, stack.d_v) if n] or [config.d_model]
    common = math.gcd(*widths)
    shared = [stack.num_heads // stack.num_kv_heads for stack in stacks if stack.num_kv_heads] or [1]
    return tuple(n for n in range(1, min(common, 64) + 1) if common % n == 0 and n % math.lcm(*shared) == 0)


@torch.no_grad()
def _disturbed(members: Sequence[Tensor], comparator: Comparator, config: TransformerConfig) -> float:
    originals = [member.detach().clone() for member in members]
    generator = torch.Generator().manual_seed(0)
    for member in members:
        size = float(member.std(correction=0)) or 1.0
        noise = torch.randn(member.shape, generator=generator, dtype=member.dtype)
        member.add_(noise, alpha=_NOISE * size)
    error = comparator.compare(config).worst
    for member, original in zip(members, originals, strict=True):
        member.copy_(original)
    return error


def _kind(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


def _short(number: float) -> float:
    return float(f"{number:.1e}") if math.isfinite(number) else 1e308


def _spelled(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
