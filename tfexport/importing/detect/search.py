"""Find layout and switches by comparing candidates with reference outputs.

Most wrong candidates differ on the shortest row at the first target position. The search runs every combination of
switches there, and refines only the closest ones on the whole batch, one switch after the other.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect._draft import drafts
from tfexport.importing.layout.apply import PLACEHOLDERS, Canonical, apply_layout, fits_names, possible_heads
from tfexport.importing.layout.layout import Layout, render_layout
from tfexport.importing.layout.sizes import Switches, configured, options, with_switches
from tfexport.importing.reference.certificate import GROWTH, certify
from tfexport.importing.reference.compare import TOLERANCE, Comparator, Comparison, check_fits, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.config import TransformerConfig
from tfexport.nn.switches import SWITCHES, Value

FLOAT32_TOLERANCE = 1e-6  # if the original computes parts in float32
_EXACT = 1e-13  # rounding error of float64; no candidate is closer
# The shortest row decides every switch except eps and the kind of gelu. Wrong values have at least this error.
_NEAR = 0.05
# Only the right combination of these switches is closer than this, so it is refined at once.
_HIT = 1e-3
_MAX_REFINED, _MAX_ROUNDS, _MAX_DRAFTS, _MAX_ATTENTIONS = 6, 4, 100_000, 2_000
Choices = Mapping[str, Sequence[Value]]
_MORE = 24  # drafts to try after one whose error float32 could explain
_HOPELESS = 16  # drafts that cannot be applied, before the search stops
# Attention and pooling over one token return that token, regardless of these switches.
_PARTS = ("attention", "cross-attention", "positions")
_OF_SEVERAL = {"num_heads", "pooling", *(name for name, switch in SWITCHES.items() if switch.acts in _PARTS)}
# The first and the last switches to change, which depend on each other.
_TOGETHER = (("num_heads", "attention_scale", "pooling"), ("rotary_scaling", "rotary_factor", "rotary_original_length"))
# Searched switches whose effect exceeds rounding errors. Two values of eps can be too close.
_SEARCHED = {name for name, switch in SWITCHES.items() if switch.search and not switch.rare}
_RARE = {name for name, switch in SWITCHES.items() if switch.rare}
_DECIDING = {"num_heads", *_SEARCHED} - {"norm_eps"}
_BY_HEAD = ("split_heads", "block_diag", "heads_last")  # folds that depend on the number of heads


@dataclass
class Budget:
    """Limit a search by the number of candidates, regardless of machine speed."""

    limit: int
    report: Callable[[str], None] = lambda _: None
    on_progress: Callable[[float], None] = lambda _: None
    spent: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether the limit is reached."""
        return self.spent >= self.limit

    def spend(self) -> None:
        """Count one candidate; report each tenth of the limit."""
        self.spent += 1
        self.on_progress(min(self.spent / self.limit, 1.0))
        if self.spent * 10 // self.limit > (self.spent - 1) * 10 // self.limit and not self.is_over:
            self.report(f"searching: {self.spent:,} of {self.limit:,} candidates")


@dataclass(frozen=True)
class Candidate:
    """A layout with all its switches, and its comparison with the reference outputs."""

    layout: Layout
    comparison: Comparison
    switches: Switches

    @property
    def error(self) -> float:
        """Largest error of any stage."""
        return self.comparison.worst


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    best: Candidate | None  # None if no candidate could be run
    accepted: bool
    is_float32: bool  # the error is above `tolerance`; if accepted, the original computes parts in float32
    proposals: int
    is_cut: bool  # the budget ended the search
    tolerance: float
    refused: str  # why the last layout could not be applied


class Detection(NamedTuple):
    """The closest layout; `search` is None without reference outputs."""

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

    `tensors` is the state dict that the reference outputs were recorded with, preferably float64.
    """
    reference = reference and replace(reference, long=())  # the proof compares them once
    known = [layout for layout in builtin if fits_names(layout, tensors)]
    if known:
        report(f"names fit the layout {' and '.join(layout.name for layout in known)}")
    if reference is None:
        if len(known) > 1:
            names = ", ".join(layout.name for layout in known)
            raise CheckpointError(f"{len(known)} layouts fit by name ({names}); give --layout or --reference")
        return Detection(known[0] if known else next(drafts(tensors)), None)
    searcher = _Searcher(tensors, reference, budget or Budget(ImportConfig.search_budget), settings or {})
    search = None
    if known:
        # A model with the names of a known layout can have other switches: options of its code, or a fork.
        for as_written in (True, False):
            search = searcher.run(known, report, as_written=as_written)
            is_final = search.accepted and not (as_written and search.is_float32)  # another eps may be exact
            if search.best is not None and (is_final or search.is_cut):
                return Detection(search.best.layout, search)
        report("no known layout reproduces the reference outputs; matching names, indices and shapes")
    drafted = searcher.run(itertools.islice(drafts(tensors, reference), _MAX_DRAFTS), report)
    if drafted.best is not None and drafted.accepted and drafted.is_float32:
        # A float32 error is accepted only if every other value of a switch is clearly worse.
        layout = drafted.best.layout
        canonical = apply_layout(layout, tensors, settings=PLACEHOLDERS, attributes=reference.attributes)
        found = certify(canonical, reference, layout.name)
        clear = GROWTH * (found.error or 0.0)
        others = {name: other.error for name, other in found.switches.items() if name.rpartition(".")[2] in _DECIDING}
        if unclear := [name for name, error in others.items() if error < clear]:
            report(f"error {found.error:.1e}, but other values of {', '.join(unclear)} have a similar error")
            drafted = replace(drafted, accepted=False)
    best = drafted.best or (search.best if search else None)
    return Detection(best.layout if best else next(drafts(tensors, reference)), drafted)


def not_found(layout: Layout, search: Search, budget: Budget, signs: Iterable[str], output: Path) -> ParityError:
    """Write the closest layout next to the output and return the error that names it."""
    names = (f"{output.name}.layout{f'-{i}' if i > 1 else ''}.yaml" for i in itertools.count(1))
    started = next(path for name in names if not os.path.lexists(path := output.with_name(name)))
    try:
        started.parent.mkdir(parents=True, exist_ok=True)
        started.write_text(render_layout(layout), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{started}: cannot be written ({error.strerror or error})") from error
    tried = f"{search.proposals} mapping{'s' * (search.proposals != 1)} with {budget.spent:,} candidates"
    if search.is_cut:
        tried += f", the limit; raise it with --search-budget {10 * budget.limit}"
    features = "".join(f"; {sign}" for sign in signs)
    if search.best is None:
        refused = f"none could be run ({search.refused})"
        return ParityError(f"no layout was found: tried {tried}, {refused}{features}; complete {started}")
    return ParityError(
        f"no layout reproduces the reference outputs{features}: tried {tried}; the closest has error "
        f"{search.best.error:.1e}, expected at most {search.tolerance:.0e}; the difference is in the "
        f"{search.best.comparison.stage(search.tolerance)}; complete {started} and give it as --layout, or export the "
        "model as your own module, see docs/guides/your-own-module.md"
    )


class _Searcher:
    def __init__(
        self, tensors: Mapping[str, Tensor], reference: ReferenceOutputs, budget: Budget, settings: Mapping[str, Value]
    ) -> None:
        self.tensors, self.reference, self.budget, self.settings = tensors, reference, budget, settings
        self.first = _first_position(reference)
        # The shortest features are recorded so that they become one position.
        self.is_single = self.first.source_ids.shape[1] == 1 or self.first.source_ids.dim() == 3
        self.refused = ""

    def run(self, layouts: Iterable[Layout], report: Callable[[str], None], *, as_written: bool = False) -> Search:
        """Try layouts until one fits; `as_written` keeps their switches."""
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
        heads = self.settings.get("num_heads", self.reference.heads or layout.switch("num_heads"))
        if isinstance(heads, int):
            return [[heads]]
        possible = possible_heads(layout, self.tensors, self.reference.attributes)
        if not possible:
            self._applied(layout, 1)  # sets `refused`
            return []
        depends = any(fold in line for line in layout.map for fold in _BY_HEAD)
        return [[n] for n in possible] if depends else [possible]

    def _choices(self, canonical: Canonical, heads: Sequence[int], *, as_written: bool) -> Choices:
        if as_written:
            return {"num_heads": tuple(heads)}
        config = canonical.config
        scaled = replace(config, rotary_scaling="llama3")  # so that all switches of scaling have an effect
        choices = {
            name: values
            for name, values in options(scaled).items()
            if not {name, name.rpartition(".")[2]} & self.settings.keys()
        }
        for side, stack in (("enc", config.encoder), ("dec", config.decoder)):
            # If there is a norm after the last layer, the layers are usually pre-norm.
            place = f"{side}.norm_place"
            if place in choices and stack is not None and stack.final_norm:
                choices[place] = choices[place][::-1]
            if stack is not None and (stack.norm_place == "sandwich" or stack.parallel != "none"):
                choices.pop(place, None)
        return {"num_heads": tuple(heads), **choices}

    def _applied(self, layout: Layout, heads: int) -> Canonical | None:
        settings = {**PLACEHOLDERS, **{f"tokens.{k}": v for k, v in layout.tokens.items()}, **self.settings}
        settings.pop("num_heads", None)
        settings["num_heads"] = heads  # the last one, so that it replaces the heads of both sides
        try:
            canonical = apply_layout(layout, self.tensors, settings=settings, attributes=self.reference.attributes)
            check_fits(canonical.config, self.reference)
        except (CheckpointError, ConfigError, ParityError) as error:
            self.refused = str(error)
            self.budget.spend()
            return None
        return canonical

    def _search(self, canonical: Canonical, layout: Layout, choices: Choices, found: Switches) -> Candidate | None:
        start = {name: found.get(name, values[0]) for name, values in choices.items()}
        later = {"norm_eps", *_RARE, *(_OF_SEVERAL if self.is_single else ("positions", "relative_bias"))}
        if any(side and side.num_kv_heads for side in (canonical.config.encoder, canonical.config.decoder)):
            later.discard("num_heads")  # it decides which values a head shares
        coarse = {
            name: [value for value in values if value != "gelu_tanh"]
            for name, values in choices.items()
            if not found and name not in later
        }
        first = Comparator(canonical, self.first)
        whole = Comparator(canonical, self.reference, model=first.model)
        best: tuple[Comparison, Switches] | None = None
        for error, switches in self._starts(first, start, coarse):
            if error > _NEAR and best is not None:
                break
            changes, near = choices if error <= _NEAR else {}, switches
            if changes and self.is_single and not found:
                inside = {name: values for name, values in choices.items() if name not in _OF_SEVERAL}
                exact, near = self._refined(first, switches, inside)
                changes = changes if exact.worst <= _HIT else {}
                near = self._attention(whole, near, changes, max(FLOAT32_TOLERANCE, 10 * exact.worst))
            # With the switches of another close layout, this one is also close on the whole batch, or it is wrong.
            refined = self._refined(whole, near, changes, within=_HIT if found else math.inf)
            if best is None or refined[0].worst < best[0].worst:
                best = refined
            if best[0].worst <= FLOAT32_TOLERANCE:
                break
        if best and "norm_eps" in choices and TOLERANCE < best[0].worst <= _HIT:
            best = min(best, self._with_other_eps(whole, *best), key=lambda one: one[0].worst)
        return Candidate(with_switches(layout, {**best[1], **self.settings}), *best) if best else None

    def _with_other_eps(
        self, comparator: Comparator, comparison: Comparison, switches: Switches
    ) -> tuple[Comparison, Switches]:
        # The error grows in proportion to the distance from the right value, which need not be one of those tried.
        eps = float(str(switches["norm_eps"]))
        step = 0.1 * eps or 1e-9
        slope = (self._compared(comparator, {**switches, "norm_eps": eps + step}).worst - comparison.worst) / step
        guess = {**switches, "norm_eps": float(f"{max(eps - comparison.worst / slope, 0.0) if slope else eps:.1e}")}
        return self._compared(comparator, guess), guess

    def _starts(self, comparator: Comparator, start: Switches, coarse: Choices) -> Iterator[tuple[float, Switches]]:
        others: list[tuple[float, int, Switches]] = []
        for values in _combinations(coarse, {}):
            if self.budget.is_over:
                break
            error = self._compared(comparator, {**start, **values}).worst
            if error <= _HIT:
                yield error, {**start, **values}
            else:
                others.append((error, len(others), {**start, **values}))
        for error, _, switches in sorted(others)[:_MAX_REFINED]:
            yield error, switches

    def _attention(self, comparator: Comparator, switches: Switches, choices: Choices, enough: float) -> Switches:
        # All other switches are right.
        best, closest = math.inf, switches
        own = {name: values for name, values in choices.items() if name in _OF_SEVERAL}
        usual = {name: values for name, values in own.items() if name not in _RARE}
        turns = {name: values for name, values in own.items() if name.startswith("rotary") or name in _TOGETHER[0]}
        for names in (usual, turns):
            for change in itertools.islice(_combinations(names, switches), _MAX_ATTENTIONS):
                if self.budget.is_over or best <= enough:
                    return closest
                changed = {**switches, **change}
                try:
                    error = self._compared(comparator, changed).worst
                except ConfigError:  # it does not fit the sizes
                    continue
                if error < best:
                    best, closest = error, changed
        return closest

    def _refined(
        self, comparator: Comparator, switches: Switches, choices: Choices, *, within: float = math.inf
    ) -> tuple[Comparison, Switches]:
        # A candidate whose error is above `within` is not refined.
        best = self._compared(comparator, switches), switches
        for _ in range(_MAX_ROUNDS if best[0].worst <= within else 0):
            before = best[0].worst
            for change in _single_changes(choices):
                if best[0].worst <= _EXACT or self.budget.is_over:
                    return best
                changed = {**best[1], **change}
                if changed == best[1] or not _has_effect(changed, best[1]):
                    continue
                try:
                    comparison = self._compared(comparator, changed)
                except ConfigError:  # it does not fit the sizes
                    continue
                if comparison.worst < best[0].worst:
                    best = comparison, changed
            if best[0].worst == before:
                break
        return best

    def _compared(self, comparator: Comparator, switches: Switches) -> Comparison:
        config = _configured(comparator.config, tuple(switches.items()))
        if config not in comparator.known:
            self.budget.spend()
            comparator.known[config] = comparator.compare(config)
        return comparator.known[config]


@functools.lru_cache(maxsize=8192)
def _configured(config: TransformerConfig, switches: tuple[tuple[str, Value], ...]) -> TransformerConfig:
    return configured(config, dict(switches))


def _single_changes(choices: Choices) -> Iterator[dict[str, Value]]:
    first, last = ([name for name in names if name in choices] for names in _TOGETHER)
    alone = [name for name in choices if name not in (*first, *last)]
    for names in (first, *([name] for name in sorted(alone, key=lambda name: name != "norm_eps")), last):
        for values in itertools.product(*(choices[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def _combinations(choices: Choices, switches: Switches) -> Iterator[dict[str, Value]]:
    """Yield all combinations that have an effect, first those of few unusual values."""
    usual = {**switches, **{name: values[0] for name, values in choices.items()}}
    for picked in sorted(itertools.product(*(range(len(values)) for values in choices.values())), key=sum):
        change = {name: values[place] for (name, values), place in zip(choices.items(), picked, strict=True)}
        if _has_effect(usual | change, usual):
            yield change


def _has_effect(switches: Switches, before: Switches) -> bool:
    return all(
        switches.get(where[0], where[1][0]) in where[1]
        for name, value in switches.items()
        if value != before[name] and name in SWITCHES and (where := SWITCHES[name].where)
    )


def _first_position(reference: ReferenceOutputs) -> ReferenceOutputs:
    row = int(reference.source_mask.sum(1).argmin())
    source = (slice(row, row + 1), slice(0, int(reference.source_mask[row].sum())))
    target = (slice(row, row + 1), slice(0, 1))
    places: dict[str, tuple[slice, ...]] = dict.fromkeys(("source_ids", "source_mask", "hidden_states"), source)
    places |= dict.fromkeys(("target_ids", "target_mask", "logits"), target)
    if reference.head != "none":
        places["logits"] = source if reference.head == "token" else source[:1]
    tensors = ((name, getattr(reference, name)) for name in places)
    changes: dict[str, Any] = {name: tensor[places[name]] for name, tensor in tensors if tensor is not None}
    return replace(reference, state={}, attributes={}, real={}, **changes)
