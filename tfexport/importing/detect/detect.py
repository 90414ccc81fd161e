"""Detection: which layout reads a checkpoint, known or found, proven by a golden where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.importing.detect.budget import CANDIDATES, Budget
from tfexport.importing.detect.match import Proposal, proposals
from tfexport.importing.detect.search import Search, Searcher
from tfexport.importing.layout.apply import apply_layout, fits_names
from tfexport.importing.layout.layout import Layout
from tfexport.importing.reference.certificate import GROWTH, certify
from tfexport.importing.reference.golden import Golden
from tfexport.nn.switches import SWITCHES, Value

FOUND = "found"
# What no rounding hides, of all that is searched. Two values of eps may be too close to tell.
_DECIDING = {"num_heads", *(name for name, switch in SWITCHES.items() if switch.search and not switch.rare)} - {
    "norm_eps"
}


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The layout that was found.

    `is_builtin` says whether it is one that tfexport brings. `search` has the
    numbers, None without a golden: then nothing is proven.
    """

    layout: Layout
    is_builtin: bool
    search: Search | None


def detect(
    tensors: Mapping[str, Tensor],
    golden: Golden | None,
    builtin: Sequence[Layout],
    *,
    budget: Budget | None = None,
    heads: int | None = None,
    settings: Mapping[str, Value] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Detection:
    """Find the layout of a checkpoint.

    Known layouts whose names all fit propose first, then the general matcher.
    With a golden, numbers alone decide; the nearest candidate is returned even
    where none is near enough, see `Search.accepted`.

    Args:
        tensors: the state dict; with a golden that has its own, that one, best in float64.
        golden: what the original computed, or None.
        builtin: layouts to propose first.
        budget: how many candidates may be run; None for as many as an import has.
        heads: attention heads, where known.
        settings: switches and tokens that are given.
        report: receives a line for each step.

    Raises:
        CheckpointError: no layers are recognised, or, without a golden, two known layouts fit by name.
    """
    known = [layout for layout in builtin if fits_names(layout, tensors)]
    if known:
        report(f"names fit the layout {' and '.join(layout.name for layout in known)}")
    if golden is None:
        return _unproven(tensors, known)
    budget = budget or Budget(CANDIDATES)
    searcher = Searcher(tensors, golden, budget=budget, heads=heads, settings=settings)
    search = None
    if known:
        # A model whose names are those of a known layout may have other switches: as an option of its code, in a fork.
        known_ones = [Proposal(layout, 0) for layout in known]
        for as_written in (True, False):
            search = searcher.run(known_ones, report, as_written=as_written)
            if search.best is not None and (search.accepted or search.is_cut):
                return Detection(layout=search.best.layout, is_builtin=True, search=search)
        report("no known layout reproduces the golden; matching names, indices and shapes")
    matched = searcher.run(_proposed(tensors, golden), report)
    if matched.best is not None and matched.accepted and matched.is_float32:
        matched = _if_clear(matched, matched.best.layout, tensors, golden, report)
    best = matched.best or (search.best if search else None)
    layout = best.layout if best else next(_proposed(tensors, golden)).layout
    return Detection(layout=layout, is_builtin=False, search=matched)


def _if_clear(
    search: Search, layout: Layout, tensors: Mapping[str, Tensor], golden: Golden, report: Callable[[str], None]
) -> Search:
    """Take an error that float32 may have caused only where every other value of a switch is clearly worse."""
    placeholders: dict[str, Value] = {f"tokens.{name}": 0 for name in ("pad", "start", "eos")}
    canonical = apply_layout(layout, tensors, settings=placeholders, attributes=golden.attributes)
    found = certify(canonical, golden, layout.name)
    seen = GROWTH * (found.error or 0.0)
    unclear = [
        name for name, other in found.switches.items() if name.rpartition(".")[2] in _DECIDING and other.error < seen
    ]
    if unclear:
        report(f"error {found.error:.1e}, but other values of {', '.join(unclear)} come as near")
    return replace(search, accepted=not unclear)


def _unproven(tensors: Mapping[str, Tensor], known: Sequence[Layout]) -> Detection:
    if len(known) > 1:
        names = ", ".join(layout.name for layout in known)
        raise CheckpointError(
            f"{len(known)} layouts fit by name ({names}) and nothing tells which; give --layout with one of them, "
            "or a golden, which decides"
        )
    layout = known[0] if known else next(_proposed(tensors, None)).layout
    return Detection(layout=layout, is_builtin=bool(known), search=None)


def _proposed(tensors: Mapping[str, Tensor], golden: Golden | None) -> Iterator[Proposal]:
    return itertools.islice(proposals(tensors, golden, name=FOUND), 100_000)
