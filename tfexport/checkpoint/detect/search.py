"""The search: proposals of the matcher and values of the switches, compared with a golden alone.

Most proposals are wrong in a way that shows at once: on the shortest row, at the
first target position, every combination of switches is run. Only what comes
near there is refined on the whole batch, one switch after the other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tfexport.checkpoint.detect.match import Proposal
from tfexport.checkpoint.layout.apply import Canonical, apply_layout
from tfexport.checkpoint.layout.layout import Layout
from tfexport.checkpoint.layout.switches import Switches, configured, options, with_switches
from tfexport.checkpoint.reference.compare import TOLERANCE, Comparator, Comparison, check_fits, tolerance
from tfexport.checkpoint.reference.golden import Golden
from tfexport.errors import CheckpointError, ConfigError, ParityError
from tfexport.models.switches import Value

# An original that computes parts in float32 comes no nearer than this.
FLOAT32_TOLERANCE = 1e-6
# On the shortest row every switch but eps and the kind of gelu is decided; wrong ones are at least as far off as this.
_NEAR = 0.05
_REFINED = 6
# Behind a hit that float32 could explain, so many proposals may still be better.
_MORE = 24
# When so many proposals cannot even be applied, none can.
_HOPELESS = 16
_ROUNDS = 4
_MOST_HEADS = 64
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
    tolerance for originals that compute parts in float32 takes it.
    """

    best: Candidate | None
    accepted: bool
    is_float32: bool
    proposals: int
    combinations: int
    seconds: float
    tolerance: float
    refused: str = ""


class Searcher:
    """One search: counts what it tries and keeps the nearest candidate."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        golden: Golden,
        *,
        heads: int | None = None,
        settings: Mapping[str, Value] | None = None,
        seconds: float = 50.0,
    ) -> None:
        """Prepare a search.

        Args:
            tensors: the state dict that the golden was recorded with.
            golden: decides.
            heads: attention heads; None leaves it to the golden, or tries every divisor.
            settings: switches and tokens that are not to be searched.
            seconds: after which no further proposal is tried.
        """
        self.tensors, self.golden, self.seconds = tensors, golden, seconds
        self.heads = heads or golden.heads
        self.settings = dict(settings or {})
        self.first = _first_position(golden)
        self.combinations = 0
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
        start, tried = time.monotonic(), 0
        best: Candidate | None = None
        accepted_at: int | None = None
        for proposal in proposals:
            is_late = time.monotonic() - start > self.seconds
            if is_late or (accepted_at is not None and tried > accepted_at + _MORE):
                break
            tried += 1
            if tried > _HOPELESS and best is None:
                break
            found = {} if best is None or accepted_at is None else best.switches
            candidate = self.try_proposal(proposal.layout, as_written=as_written, found=found)
            if candidate is not None and (best is None or candidate.error < best.error):
                best = candidate
                report(f"proposal {tried}: error {best.error:.1e}")
            if best is not None and best.error <= self._tolerance(best):
                break
            if accepted_at is None and best is not None and best.error <= FLOAT32_TOLERANCE:
                accepted_at = tried
        error, wanted = (math.inf, TOLERANCE) if best is None else (best.error, self._tolerance(best))
        return Search(
            best,
            error <= max(wanted, FLOAT32_TOLERANCE),
            error > wanted,
            tried,
            self.combinations,
            time.monotonic() - start,
            wanted,
            self.refused,
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
        canonical = self._applied(layout, 1)
        if canonical is None:
            return []
        rows = [t.shape[0] for name, t in canonical.tensors.items() if name.endswith((".q.weight", ".v.weight"))]
        common = math.gcd(*rows)
        every = [n for n in range(1, min(common, _MOST_HEADS) + 1) if common % n == 0]
        depends = any(fold in line for line in layout.map for fold in _BY_HEAD)
        return [[n] for n in every] if depends else [every]

    def _choices(
        self, canonical: Canonical, layout: Layout, heads: Sequence[int], *, as_written: bool
    ) -> dict[str, tuple[Value, ...]]:
        """Return the values to try of every switch; one alone where it is given."""
        given = {**(layout.arch if as_written else {}), **self.settings}
        choices = {
            name: values
            for name, values in options(canonical.config).items()
            if not as_written and not _is_given(name, given)
        }
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
            return None
        return canonical

    def _search(
        self, canonical: Canonical, layout: Layout, choices: Mapping[str, tuple[Value, ...]], found: Switches
    ) -> Candidate | None:
        start = {name: found.get(name, values[0]) for name, values in choices.items()}
        # Attention over one token is that token, whatever its scale and heads.
        later = {"norm_eps", *(("num_heads", "attention_scale") if self.first.source_ids.shape[1] == 1 else ())}
        coarse = {
            name: [value for value in values if value != "gelu_tanh"]
            for name, values in choices.items()
            if not found and name not in later
        }
        comparator = Comparator(canonical, self.first)
        ranked: list[tuple[float, int, dict[str, Value]]] = []
        for values in itertools.product(*coarse.values()):
            switches = {**start, **dict(zip(coarse, values, strict=True))}
            ranked.append((self._compared(comparator, canonical, switches).worst, len(ranked), switches))
        ranked.sort(key=lambda entry: entry[:2])
        whole = comparator.on(self.golden)
        best: tuple[float, Switches, Comparison] | None = None
        for error, _, switches in ranked[:_REFINED]:
            if error > _NEAR and best is not None:
                break
            refined = self._refined(whole, canonical, switches, choices if error <= _NEAR else {})
            if best is None or refined[0] < best[0]:
                best = refined
            if best[0] <= FLOAT32_TOLERANCE:
                break
        if best is None:
            return None
        return Candidate(with_switches(layout, {**best[1], **self.settings}), best[2], best[1])

    def _refined(
        self, comparator: Comparator, canonical: Canonical, switches: Switches, choices: Mapping[str, tuple[Value, ...]]
    ) -> tuple[float, Switches, Comparison]:
        """Change one switch after the other, as long as that brings it nearer."""
        comparison = self._compared(comparator, canonical, switches)
        best = (comparison.worst, dict(switches), comparison)
        for _ in range(_ROUNDS):
            before = best[0]
            for change in _single_changes(choices):
                changed = {**best[1], **change}
                comparison = self._compared(comparator, canonical, changed)
                if comparison.worst < best[0]:
                    best = (comparison.worst, changed, comparison)
            if best[0] == before or best[0] <= TOLERANCE:
                break
        return best

    def _compared(self, comparator: Comparator, canonical: Canonical, switches: Switches) -> Comparison:
        self.combinations += 1
        return comparator.compare(configured(canonical.config, switches))


# Decoding needs these ids, comparing does not.
_PLACEHOLDERS: dict[str, Value] = {"tokens.pad": 0, "tokens.start": 0, "tokens.eos": 0}


def _is_given(name: str, given: Switches) -> bool:
    return name in given or name.rpartition(".")[2] in given


def _single_changes(choices: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """List the single steps; the scale of attention depends on the heads, so that these two go together."""
    pairs = [name for name in ("num_heads", "attention_scale") if name in choices]
    for values in itertools.product(*(choices[name] for name in pairs)):
        yield dict(zip(pairs, values, strict=True))
    for name, options_of in choices.items():
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
