"""Find layout and switches by comparing candidates with reference outputs.

Most wrong candidates differ on the shortest row at the first target position. The search runs every combination of
switches there, and refines only the closest ones on the whole batch, one switch after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect._draft import drafts
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names, possible_heads
from tfexport.importing.layout.layout import Layout
from tfexport.importing.layout.sizes import Switches, configured, options, with_switches
from tfexport.importing.reference.certificate import GROWTH, certify
from tfexport.importing.reference.compare import TOLERANCE, Comparator, Comparison, check_fits, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.switches import SWITCHES, Value

# Largest error to accept if the original computes parts in float32.
FLOAT32_TOLERANCE = 1e-6
# Rounding error of float64; no candidate is closer.
_EXACT = 1e-13
# The shortest row decides every switch except eps and the kind of gelu. Wrong values have at least this error.
_NEAR = 0.05
# Only the right combination of these switches is closer than this, so it is refined at once.
_HIT = 1e-3
_MAX_REFINED, _MAX_ROUNDS, _MAX_DRAFTS = 6, 4, 100_000
# Number of drafts to try after one whose error float32 could explain.
_MORE = 24
# The search stops if this many drafts cannot be applied.
_HOPELESS = 16
# Switches that a draft decides and the search does not change.
_DECIDED = ("positions", "relative_bias")
# Attention over one token returns that token, regardless of scale, heads and rotation.
_OF_SEVERAL = ("num_heads", "attention_scale", "rotary_pairs", "rotary_cross")
# Searched switches whose effect exceeds rounding errors. Two values of eps can be too close.
_DECIDING = {"num_heads", *(name for name, switch in SWITCHES.items() if switch.search and not switch.rare)} - {
    "norm_eps"
}
# Folds whose result depends on the number of heads.
_BY_HEAD = ("split_heads", "block_diag", "heads_last")
# Decoding needs these ids, but comparing does not.
_PLACEHOLDERS: dict[str, Value] = {"tokens.pad": 0, "tokens.start": 0, "tokens.eos": 0}


class Budget:
    """Limit a search by the number of candidates, regardless of machine speed.

    `report` receives a line after every tenth of the limit, `on_progress` the share after each candidate.
    """

    def __init__(
        self,
        limit: int,
        report: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.limit, self.spent = limit, 0
        self._report, self._on_progress = report, on_progress

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.spent >= self.limit

    def spend(self) -> None:
        """Count one candidate."""
        self.spent += 1
        self._on_progress(min(self.spent / self.limit, 1.0))
        if self.spent * 10 // self.limit > (self.spent - 1) * 10 // self.limit and not self.is_over:
            self._report(f"searching: {self.spent:,} of {self.limit:,} candidates")


@dataclass(frozen=True)
class Candidate:
    """A layout with all its switches, and its distance from the reference outputs."""

    layout: Layout
    comparison: Comparison
    switches: Switches

    @property
    def error(self) -> float:
        """Largest error of any stage."""
        return self.comparison.worst


@dataclass(frozen=True)
class Search:
    """Result of a search; `best` is None if no candidate could be run.

    `is_float32` means that the error is above `tolerance`; if it is accepted, the original computes parts in float32.
    `is_cut` means that the budget ended the search. `refused` is the reason why a layout could not be applied.
    """

    best: Candidate | None
    accepted: bool
    is_float32: bool
    proposals: int
    is_cut: bool
    tolerance: float
    refused: str = ""


class Detection(NamedTuple):
    """The layout that was found; `search` is None without reference outputs."""

    layout: Layout
    search: Search | None


def detect(
    tensors: Mapping[str, Tensor],
    reference: ReferenceOutputs | None,
    builtin: Sequence[Layout],
    *,
    budget: Budget | None = None,
    settings: Mapping[str, Value] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Detection:
    """Find the layout of a checkpoint among known layouts, then among drafts.

    The function returns the closest candidate even if it is not accepted. `tensors` is the state dict that the
    reference outputs were recorded with, preferably float64.

    Raises:
        CheckpointError: No layers are recognized, or, without reference outputs, several known layouts fit by name.
    """
    known = [layout for layout in builtin if fits_names(layout, tensors)]
    if known:
        report(f"names fit the layout {' and '.join(layout.name for layout in known)}")
    if reference is None:
        if len(known) > 1:
            names = ", ".join(layout.name for layout in known)
            raise CheckpointError(
                f"{len(known)} layouts fit by name ({names}) and nothing tells which; give --layout with one of them, "
                "or reference outputs, which decide"
            )
        return Detection(known[0] if known else next(drafts(tensors)), None)
    searcher = _Searcher(tensors, reference, budget or Budget(ImportConfig.search_budget), settings or {})
    search = None
    if known:
        # A model with the names of a known layout can have other switches: options of its code, or a fork.
        for as_written in (True, False):
            search = searcher.run(known, report, as_written=as_written)
            if search.best is not None and (search.accepted or search.is_cut):
                return Detection(search.best.layout, search)
        report("no known layout reproduces the reference outputs; matching names, indices and shapes")
    drafted = searcher.run(itertools.islice(drafts(tensors, reference), _MAX_DRAFTS), report)
    if drafted.best is not None and drafted.accepted and drafted.is_float32:
        drafted = _if_clear(drafted, drafted.best.layout, tensors, reference, report)
    best = drafted.best or (search.best if search else None)
    return Detection(best.layout if best else next(drafts(tensors, reference)), drafted)


def _if_clear(
    search: Search,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    reference: ReferenceOutputs,
    report: Callable[[str], None],
) -> Search:
    """Accept a float32 error only if every other value of a switch is clearly worse."""
    canonical = apply_layout(layout, tensors, settings=_PLACEHOLDERS, attributes=reference.attributes)
    found = certify(canonical, reference, layout.name)
    clear = GROWTH * (found.error or 0.0)
    unclear = [
        name for name, other in found.switches.items() if name.rpartition(".")[2] in _DECIDING and other.error < clear
    ]
    if unclear:
        report(f"error {found.error:.1e}, but other values of {', '.join(unclear)} come as near")
    return replace(search, accepted=not unclear)


class _Searcher:
    def __init__(
        self, tensors: Mapping[str, Tensor], reference: ReferenceOutputs, budget: Budget, settings: Mapping[str, Value]
    ) -> None:
        self.tensors, self.reference, self.budget, self.settings = tensors, reference, budget, settings
        self.first = _first_position(reference)
        self.refused = ""

    def run(self, layouts: Iterable[Layout], report: Callable[[str], None], *, as_written: bool = False) -> Search:
        """Try layouts in order until one reproduces the reference outputs.

        `report` receives a line for each closer candidate. If `as_written` is True, the switches of the layouts do not
        change.
        """
        tried = 0
        best: Candidate | None = None
        accepted_at: int | None = None
        for layout in layouts:
            if self.budget.is_over or (accepted_at is not None and tried > accepted_at + _MORE):
                break
            tried += 1
            if tried > _HOPELESS and best is None:
                break
            found = {} if best is None or accepted_at is None else best.switches
            candidate = self._try(layout, found, as_written=as_written)
            if candidate is not None and (best is None or candidate.error < best.error):
                best = candidate
                report(f"mapping {tried}, candidate {self.budget.spent:,}: error {best.error:.1e}")
            if best is not None and best.error <= tolerance(self.reference, best.layout.baseline):
                break
            if accepted_at is None and best is not None and best.error <= FLOAT32_TOLERANCE:
                accepted_at = tried
        error, wanted = math.inf, TOLERANCE
        if best is not None:
            error, wanted = best.error, tolerance(self.reference, best.layout.baseline)
        accepted = error <= max(wanted, FLOAT32_TOLERANCE)
        is_cut = not accepted and self.budget.is_over
        return Search(best, accepted, error > wanted, tried, is_cut, wanted, self.refused)

    def _try(self, layout: Layout, found: Switches, *, as_written: bool) -> Candidate | None:
        # `found` has the switches of another layout that came close.
        candidates = []
        for heads in self._heads(layout):
            if (canonical := self._applied(layout, heads[0])) is not None:
                choices = self._choices(canonical, heads, as_written=as_written)
                candidates.append(self._search(canonical, layout, choices, found))
        return min((one for one in candidates if one), key=lambda one: one.error, default=None)

    def _heads(self, layout: Layout) -> list[list[int]]:
        # Head counts in one group make the same tensors.
        given = self.settings.get("num_heads", self.reference.heads or layout.switch("num_heads"))
        if isinstance(given, int):
            return [[given]]
        every = possible_heads(layout, self.tensors, self.reference.attributes)
        if not every:
            self._applied(layout, 1)  # sets `refused`
            return []
        depends = any(fold in line for line in layout.map for fold in _BY_HEAD)
        return [[n] for n in every] if depends else [every]

    def _choices(self, canonical: Canonical, heads: Sequence[int], *, as_written: bool) -> dict[str, tuple[Value, ...]]:
        if as_written:
            return {"num_heads": tuple(heads)}
        given = {*_DECIDED, *self.settings}
        choices = {
            name: values
            for name, values in options(canonical.config).items()
            if not {name, name.rpartition(".")[2]} & given
        }
        for side, stack in (("enc", canonical.config.encoder), ("dec", canonical.config.decoder)):
            # If there is a norm after the last layer, the layers are usually pre-norm.
            place = f"{side}.norm_place"
            if place in choices and stack is not None and stack.final_norm:
                choices[place] = choices[place][::-1]
        return {"num_heads": tuple(heads), **choices}

    def _applied(self, layout: Layout, heads: int) -> Canonical | None:
        settings = {**_PLACEHOLDERS, **{f"tokens.{k}": v for k, v in layout.tokens.items()}, **self.settings}
        settings.pop("num_heads", None)
        settings["num_heads"] = heads  # as the last one, for both sides
        try:
            canonical = apply_layout(layout, self.tensors, settings=settings, attributes=self.reference.attributes)
            check_fits(canonical.config, self.reference)
        except (CheckpointError, ConfigError, ParityError) as error:
            self.refused = str(error)
            self.budget.spend()
            return None
        return canonical

    def _search(
        self, canonical: Canonical, layout: Layout, choices: Mapping[str, tuple[Value, ...]], found: Switches
    ) -> Candidate | None:
        start = {name: found.get(name, values[0]) for name, values in choices.items()}
        rare = (name for name, switch in SWITCHES.items() if switch.rare)
        later = {"norm_eps", *rare, *(_OF_SEVERAL if self.first.source_ids.shape[1] == 1 else ())}
        coarse = {
            name: [value for value in values if value != "gelu_tanh"]
            for name, values in choices.items()
            if not found and name not in later
        }
        first = Comparator(canonical, self.first)
        whole = first.on(self.reference)
        best: tuple[Comparison, Switches] | None = None
        for error, switches in self._starts(first, canonical, start, coarse):
            if error > _NEAR and best is not None:
                break
            # With the switches of another close layout, this one is also close on the whole batch, or it is wrong.
            refined = self._refined(
                whole, canonical, switches, choices if error <= _NEAR else {}, within=_HIT if found else math.inf
            )
            if best is None or refined[0].worst < best[0].worst:
                best = refined
            if best[0].worst <= FLOAT32_TOLERANCE:
                break
        return Candidate(with_switches(layout, {**best[1], **self.settings}), *best) if best else None

    def _starts(
        self, comparator: Comparator, canonical: Canonical, start: Switches, coarse: Mapping[str, Sequence[Value]]
    ) -> Iterator[tuple[float, dict[str, Value]]]:
        others: list[tuple[float, int, dict[str, Value]]] = []
        places = itertools.product(*(range(len(values)) for values in coarse.values()))
        for picked in sorted(places, key=sum):  # combinations with the fewest unusual values first
            if self.budget.is_over:
                break
            values = {name: values[place] for (name, values), place in zip(coarse.items(), picked, strict=True)}
            error = self._compared(comparator, canonical, {**start, **values}).worst
            if error <= _HIT:
                yield error, {**start, **values}
            else:
                others.append((error, len(others), {**start, **values}))
        for error, _, switches in sorted(others)[:_MAX_REFINED]:
            yield error, switches

    def _refined(
        self,
        comparator: Comparator,
        canonical: Canonical,
        switches: Switches,
        choices: Mapping[str, tuple[Value, ...]],
        *,
        within: float,
    ) -> tuple[Comparison, Switches]:
        # A candidate whose error is above `within` is not refined.
        best = self._compared(comparator, canonical, switches), dict(switches)
        for _ in range(_MAX_ROUNDS if best[0].worst <= within else 0):
            before = best[0].worst
            for change in _single_changes(choices):
                if best[0].worst <= _EXACT or self.budget.is_over:
                    return best
                changed = {**best[1], **change}
                if changed == best[1]:
                    continue
                try:
                    comparison = self._compared(comparator, canonical, changed)
                except ConfigError:  # it does not fit the sizes
                    continue
                if comparison.worst < best[0].worst:
                    best = comparison, changed
            if best[0].worst == before:
                break
        return best

    def _compared(self, comparator: Comparator, canonical: Canonical, switches: Switches) -> Comparison:
        self.budget.spend()
        return comparator.compare(configured(canonical.config, switches))


def _single_changes(choices: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """Yield changes of one switch, first those that the first position cannot decide.

    The scale of attention depends on the number of heads, so these two change together.
    """
    pairs = [name for name in ("num_heads", "attention_scale") if name in choices]
    for values in itertools.product(*(choices[name] for name in pairs)):
        yield dict(zip(pairs, values, strict=True))
    for name, values in sorted(choices.items(), key=lambda choice: choice[0] != "norm_eps"):
        if name not in pairs:
            yield from ({name: value} for value in values)


def _first_position(reference: ReferenceOutputs) -> ReferenceOutputs:
    row = int(reference.source_mask.sum(1).argmin())
    source = (slice(row, row + 1), slice(0, int(reference.source_mask[row].sum())))
    target = (slice(row, row + 1), slice(0, 1))
    changes: dict[str, Any] = {"state": {}, "attributes": {}, "real": {}}
    for places, names in (
        (source, ("source_ids", "source_mask", "hidden_states")),
        (target, ("target_ids", "target_mask", "logits")),
    ):
        changes |= {name: tensor[places] for name in names if (tensor := getattr(reference, name)) is not None}
    return replace(reference, **changes)
