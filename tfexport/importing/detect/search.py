"""The search: proposals of the matcher and values of the switches, compared with a golden alone.

Most proposals are wrong in a way that shows at once: on the shortest row, at the
first target position, every combination of switches is run, the likeliest first.
Only what comes near there is refined on the whole batch, one switch after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.importing.detect.budget import Budget
from tfexport.importing.detect.match import Proposal
from tfexport.importing.layout.apply import Canonical, apply_layout, possible_heads
from tfexport.importing.layout.layout import Layout
from tfexport.importing.layout.switches import Switches, configured, options, with_switches
from tfexport.importing.reference.compare import TOLERANCE, Comparator, Comparison, check_fits, tolerance
from tfexport.importing.reference.golden import Golden
from tfexport.nn.switches import SWITCHES, Value

# An original that computes parts in float32 comes no nearer than this.
FLOAT32_TOLERANCE = 1e-6
# Nothing is nearer than what float64 leaves.
_EXACT = 1e-13
# On the shortest row every switch but eps and the kind of gelu is decided; wrong ones are at least as far off as this.
_NEAR = 0.05
# Nearer than this no other combination of the decided switches is, so that it is refined before any other is run.
_HIT = 1e-3
_REFINED = 6
# Behind a hit that float32 could explain, so many proposals may still be better.
_MORE = 24
# When so many proposals cannot even be applied, none can.
_HOPELESS = 16
_ROUNDS = 4
# What a layout says and no search changes: no tensor shows it, and the matcher proposes it.
_DECIDED = ("positions", "relative_bias")
# Attention over one token is that token, whatever its scale and heads, and however it is turned.
_OF_SEVERAL = ("num_heads", "attention_scale", "rotary_pairs", "rotary_cross")
# Folds that make other tensors of another number of heads.
_BY_HEAD = ("split_heads", "block_diag", "heads_last")


@dataclass(frozen=True)
class Candidate:
    """A layout with all its switches, and how far it is from the golden."""

    layout: Layout
    comparison: Comparison
    switches: Switches = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest error of any stage."""
        return self.comparison.worst


@dataclass(frozen=True)
class Search:
    """What a search came to.

    `best` is the nearest candidate, None where none could be run; `accepted`
    says whether it is within `tolerance`; `is_float32` that only the wider
    tolerance for originals that compute parts in float32 takes it. `proposals`
    counts the mappings that were tried; `is_cut` says that the budget
    ended it before one was accepted.
    """

    best: Candidate | None
    accepted: bool
    is_float32: bool
    proposals: int
    is_cut: bool
    tolerance: float
    refused: str = ""


class Searcher:
    """One search: keeps the nearest of the candidates that its budget lets it run."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        golden: Golden,
        *,
        budget: Budget,
        heads: int | None = None,
        settings: Mapping[str, Value] | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            tensors: the state dict that the golden was recorded with; float64, so that nothing is converted again and
                again.
            golden: decides.
            budget: of candidates; several searches may share it.
            heads: attention heads; None leaves it to the golden, or tries every divisor.
            settings: switches and tokens that are not to be searched.
        """
        self.tensors, self.golden, self.budget = tensors, golden, budget
        self.heads = heads or golden.heads
        self.settings = dict(settings or {})
        self.first = _first_position(golden)
        self.refused = ""

    def run(
        self,
        proposals: Iterable[Proposal],
        report: Callable[[str], None] = lambda _: None,
        *,
        as_written: bool = False,
    ) -> Search:
        """Try proposals until one reproduces the golden.

        Args:
            proposals: the likeliest first.
            report: receives a line whenever one is nearer than all before.
            as_written: leave the switches as the layouts have them.
        """
        tried = 0
        best: Candidate | None = None
        accepted_at: int | None = None
        for proposal in proposals:
            if self.budget.is_over or (accepted_at is not None and tried > accepted_at + _MORE):
                break
            tried += 1
            if tried > _HOPELESS and best is None:
                break
            found = {} if best is None or accepted_at is None else best.switches
            candidate = self.try_proposal(proposal.layout, as_written=as_written, found=found)
            if candidate is not None and (best is None or candidate.error < best.error):
                best = candidate
                report(f"mapping {tried}, candidate {self.budget.spent:,}: error {best.error:.1e}")
            if best is not None and best.error <= self._tolerance(best):
                break
            if accepted_at is None and best is not None and best.error <= FLOAT32_TOLERANCE:
                accepted_at = tried
        error, wanted = (math.inf, TOLERANCE) if best is None else (best.error, self._tolerance(best))
        return Search(
            best,
            accepted=error <= max(wanted, FLOAT32_TOLERANCE),
            is_float32=error > wanted,
            proposals=tried,
            is_cut=error > max(wanted, FLOAT32_TOLERANCE) and self.budget.is_over,
            tolerance=wanted,
            refused=self.refused,
        )

    def _tolerance(self, candidate: Candidate) -> float:
        return tolerance(self.golden, candidate.layout.baseline)

    def try_proposal(
        self, layout: Layout, *, as_written: bool = False, found: Switches | None = None
    ) -> Candidate | None:
        """Find the switches that bring one layout nearest to the golden; None where it cannot be applied.

        Args:
            layout: to try.
            as_written: leave its switches as they are.
            found: switches that another layout came near with, to begin with.
        """
        best: Candidate | None = None
        for heads in self._heads(layout):
            canonical = self._applied(layout, heads[0])
            if canonical is None:
                continue
            choices = self._choices(canonical, layout, heads, as_written=as_written)
            candidate = self._search(canonical, layout, choices, found or {})
            if candidate is not None and (best is None or candidate.error < best.error):
                best = candidate
        return best

    def _heads(self, layout: Layout) -> list[list[int]]:
        """Return the numbers of heads to try, in groups for which the layout makes the same tensors."""
        given = self.settings.get("num_heads", self.heads or layout.switch("num_heads"))
        if isinstance(given, int):
            return [[given]]
        every = possible_heads(layout, self.tensors, self.golden.attributes)
        if not every:
            self._applied(layout, 1)  # says what does not fit
            return []
        depends = any(fold in line for line in layout.map for fold in _BY_HEAD)
        return [[n] for n in every] if depends else [every]

    def _choices(
        self, canonical: Canonical, layout: Layout, heads: Sequence[int], *, as_written: bool
    ) -> dict[str, tuple[Value, ...]]:
        """Return the values to try of every switch, the likeliest first; one alone where it is given."""
        given = {**(layout.arch if as_written else dict.fromkeys(_DECIDED)), **self.settings}
        choices = {
            name: values
            for name, values in options(canonical.config).items()
            if not as_written and not _is_given(name, given)
        }
        for side, stack in (("enc", canonical.config.encoder), ("dec", canonical.config.decoder)):
            # A norm behind the last layer mostly means that none stands behind each of them.
            place = f"{side}.norm_place"
            if place in choices and stack is not None and stack.final_norm:
                choices[place] = choices[place][::-1]
        return {"num_heads": tuple(heads), **choices}

    def _applied(self, layout: Layout, heads: int) -> Canonical | None:
        settings = {**_PLACEHOLDERS, **{f"tokens.{k}": v for k, v in layout.tokens.items()}, **self.settings}
        settings.pop("num_heads", None)
        try:
            canonical = apply_layout(
                layout, self.tensors, heads=heads, settings=settings, attributes=self.golden.attributes
            )
            check_fits(canonical.config, self.golden)
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
        whole = first.on(self.golden)
        best: tuple[float, Switches, Comparison] | None = None
        for error, switches in self._starts(first, canonical, start, coarse):
            if error > _NEAR and best is not None:
                break
            # With switches that another mapping came near with, a mapping is near on the whole batch too, or wrong.
            refined = self._refined(
                whole, canonical, switches, choices if error <= _NEAR else {}, within=_HIT if found else math.inf
            )
            if best is None or refined[0] < best[0]:
                best = refined
            if best[0] <= FLOAT32_TOLERANCE:
                break
        if best is None:
            return None
        return Candidate(with_switches(layout, {**best[1], **self.settings}), best[2], best[1])

    def _starts(
        self, comparator: Comparator, canonical: Canonical, start: Switches, coarse: Mapping[str, Sequence[Value]]
    ) -> Iterator[tuple[float, dict[str, Value]]]:
        """Yield what to refine, with its error on the first position: a hit at once, then the nearest of the others."""
        others: list[tuple[float, int, dict[str, Value]]] = []
        for values in _likeliest_first(coarse):
            if self.budget.is_over:
                break
            switches = {**start, **values}
            error = self._compared(comparator, canonical, switches).worst
            if error <= _HIT:
                yield error, switches
            else:
                others.append((error, len(others), switches))
        for error, _, switches in sorted(others)[:_REFINED]:
            yield error, switches

    def _refined(
        self,
        comparator: Comparator,
        canonical: Canonical,
        switches: Switches,
        choices: Mapping[str, tuple[Value, ...]],
        *,
        within: float,
    ) -> tuple[float, Switches, Comparison]:
        """Change one switch after the other, as long as that brings nearer what is `within` some error already."""
        comparison = self._compared(comparator, canonical, switches)
        best = (comparison.worst, dict(switches), comparison)
        for _ in range(_ROUNDS if comparison.worst <= within else 0):
            before = best[0]
            for change in _single_changes(choices):
                if best[0] <= _EXACT or self.budget.is_over:
                    return best
                changed = {**best[1], **change}
                if changed == best[1]:
                    continue
                try:
                    comparison = self._compared(comparator, canonical, changed)
                except ConfigError:  # it does not go with the sizes
                    continue
                if comparison.worst < best[0]:
                    best = (comparison.worst, changed, comparison)
            if best[0] == before:
                break
        return best

    def _compared(self, comparator: Comparator, canonical: Canonical, switches: Switches) -> Comparison:
        self.budget.spend()
        return comparator.compare(configured(canonical.config, switches))


# Decoding needs these ids, comparing does not.
_PLACEHOLDERS: dict[str, Value] = {"tokens.pad": 0, "tokens.start": 0, "tokens.eos": 0}


def _is_given(name: str, given: Switches) -> bool:
    return name in given or name.rpartition(".")[2] in given


def _likeliest_first(choices: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """List the combinations, those with few and little unusual values first."""
    places = itertools.product(*(range(len(values)) for values in choices.values()))
    for picked in sorted(places, key=sum):
        yield {name: values[place] for (name, values), place in zip(choices.items(), picked, strict=True)}


def _single_changes(choices: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """List the single steps, those that the first position cannot tell first.

    The scale of attention depends on the heads, so that these two go together.
    """
    pairs = [name for name in ("num_heads", "attention_scale") if name in choices]
    for values in itertools.product(*(choices[name] for name in pairs)):
        yield dict(zip(pairs, values, strict=True))
    for name, options_of in sorted(choices.items(), key=lambda choice: choice[0] != "norm_eps"):
        if name not in pairs:
            yield from ({name: value} for value in options_of)


def _first_position(golden: Golden) -> Golden:
    """Cut a golden down to the shortest source and the first target position."""
    row = int(golden.source_mask.sum(1).argmin())
    source = (slice(row, row + 1), slice(0, int(golden.source_mask[row].sum())))
    target = (slice(row, row + 1), slice(0, 1))
    changes: dict[str, Any] = {"state": {}, "attributes": {}, "real": {}}
    for places, names in (
        (source, ("source_ids", "source_mask", "hidden_states")),
        (target, ("target_ids", "target_mask", "logits")),
    ):
        changes |= {name: tensor[places] for name in names if (tensor := getattr(golden, name)) is not None}
    return replace(golden, **changes)
