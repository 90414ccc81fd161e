"""Run the lines of a layout: tensors of a checkpoint in, canonical tensors out; once for shapes, once for values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, shortened
from tfexport.importing.layout.layout import Derived, Layout, parse_derived, parse_line, parse_post
from tfexport.importing.layout.ops import Context, Names, Step, run
from tfexport.importing.layout.patterns import matches
from tfexport.importing.layout.sinusoid import sinusoid

SOURCE_EMBEDDING = "enc.embed.weight"


class LineUse(NamedTuple):
    """One line of a layout, the checkpoint's keys that it took and the canonical tensors that it made or changed."""

    line: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Pair(NamedTuple):
    """Keys and what they become, by which line of `map`, counted from 1."""

    line: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]


def pair_names(layout: Layout, keys: Sequence[str], problems: list[str]) -> list[Pair]:
    """Match the lines of `map` and the keys of a state dict, strictly both ways."""
    pairs: list[Pair] = []
    used: dict[str, int] = {}
    for number, text in enumerate(layout.map, 1):
        line = parse_line(text)
        found = matches(line.rule, keys)
        if not found and not line.optional:
            problems.append(f"map {number} {shortened(text)}: no key matches")
        for sources, targets in found:
            problems += [
                f"key {key[:120]} is used twice, by map {used[key]} and map {number}"
                for key in sources
                if used.setdefault(key, number) != number
            ]
            pairs.append(Pair(number, sources, targets))
    is_ignored = _ignored(layout)
    for key in keys:
        ignored = is_ignored(key)
        if key not in used and not ignored:
            problems.append(f"key {key[:120]} is not used; map or ignore it")
        elif key in used and ignored:
            problems.append(f"key {key[:120]} is both used and ignored")
    return pairs


def fits_names(layout: Layout, keys: Iterable[str]) -> bool:
    """Say whether `pair_names` would find no problem; the first key that does not fit ends it."""
    lines = [parse_line(text) for text in layout.map]
    is_ignored, used = _ignored(layout), set[int]()
    for key in keys:
        taking = [number for number, line in enumerate(lines) if line.rule.match(key)]
        if len(taking) + is_ignored(key) != 1:
            return False
        used.update(taking)
    return all(line.optional or number in used for number, line in enumerate(lines))


def _ignored(layout: Layout) -> Callable[[str], bool]:
    """Return what says whether a layout ignores a key; those that it names whole are looked up."""
    whole = frozenset(layout.ignore)
    patterns = [pattern for pattern in layout.ignore if set("*?[") & set(pattern)]
    return lambda key: key in whole or any(fnmatchcase(key, pattern) for pattern in patterns)


def same(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are equal bit by bit; on the device "meta", whether they could be."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or one is other or torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def side_of(name: str) -> str:
    """Return "enc" or "dec" for a canonical name; the output is the decoder's."""
    return "enc" if name.startswith("enc.") else "dec"


class Execution:
    """The lines of one layout with the keys that they take, ready to run."""

    def __init__(self, layout: Layout, pairs: Sequence[Pair], attributes: Mapping[str, Tensor]) -> None:
        """Take what does not change between runs; `attributes` is for `derive: attr`."""
        self.layout, self.pairs, self.attributes = layout, pairs, attributes
        self.uses: list[LineUse] = []

    def width(self, meta: Mapping[str, Tensor], names: Names, problems: list[str]) -> int | None:
        """Return d_model, the width of the source embedding, found without knowing any size."""
        for pair in self.pairs:
            if SOURCE_EMBEDDING in pair.targets:
                found = self._run(pair, meta, {"enc": names, "dec": names}, problems)
                table = found[pair.targets.index(SOURCE_EMBEDDING)] if found else None
                if table is not None and table.dim() == 2:
                    return table.shape[1]
                shape = [] if table is None else list(table.shape)
                problems.append(f"{pair.sources[0]} becomes {SOURCE_EMBEDDING} {shape}, expected [vocab, d_model]")
                return None
        problems.append(f"{SOURCE_EMBEDDING} is missing; no line gives it")
        return None

    def run(
        self, tensors: Mapping[str, Tensor], names: Mapping[str, Names], length: int, problems: list[str]
    ) -> dict[str, Tensor]:
        """Make every tensor that the layout gives.

        Args:
            tensors: the state dict, with values or on the device "meta".
            names: sizes by name, for "enc" and "dec".
            length: positions of computed tables, 0 where it is not known.
            problems: receives what does not fit.
        """
        made: dict[str, Tensor] = {}
        origin: dict[str, str] = {}
        for pair in self.pairs:
            for name, tensor in zip(pair.targets, self._run(pair, tensors, names, problems), strict=False):
                if name in made and not same(made[name], tensor):
                    problems.append(f"{name} comes from {origin[name]} and from {pair.sources[0]}, which differ")
                made.setdefault(name, tensor)
                origin.setdefault(name, pair.sources[0])
        self.uses = self._map_uses()
        for target, text in self.layout.derive.items():
            derived = [name for name in _of_layers(target, made) if name not in made]
            given = [name for name in derived if self._derive(name, text, made, names, length, problems)]
            if given:
                self.uses.append(LineUse(f"derive {target}: {text}", (), tuple(given)))
        for number, text in enumerate(self.layout.post, 1):
            self._post(f"post {number}", text, made, names, problems)
        return made

    def _run(
        self, pair: Pair, tensors: Mapping[str, Tensor], names: Mapping[str, Names], problems: list[str]
    ) -> list[Tensor]:
        """Return the parts that one pair becomes, none when there is a problem."""
        context = Context(names[side_of(pair.targets[0])], len(pair.targets), _no_sibling)
        line = parse_line(self.layout.map[pair.line - 1])
        heads = int(context.names["num_heads"])
        if line.rule.joins_heads and len(pair.sources) != heads:
            problems.append(f"map {pair.line}: {pair.targets[0]} has {len(pair.sources)} heads, expected {heads}")
            return []
        return _folded(
            f"map {pair.line}: {pair.sources[0][:120]}",
            line.steps,
            [tensors[key] for key in pair.sources],
            context,
            problems,
        )

    def _map_uses(self) -> list[LineUse]:
        uses = []
        for number, text in enumerate(self.layout.map, 1):
            own = [pair for pair in self.pairs if pair.line == number]
            sources = tuple(key for pair in own for key in pair.sources)
            targets = tuple(dict.fromkeys(name for pair in own for name in pair.targets))
            if own:
                uses.append(LineUse(text, sources, targets))
        return uses

    def _derive(
        self,
        name: str,
        text: str,
        made: dict[str, Tensor],
        names: Mapping[str, Names],
        length: int,
        problems: list[str],
    ) -> bool:
        derived = parse_derived(text)
        sizes = names[side_of(name)]
        start = self._start(derived, made, sizes, length)
        if isinstance(start, str):
            problems.append(f"derive {name}: {start}")
            return False
        like = next(iter(made.values()), None)
        if like is not None and like.is_meta:
            start = start.to("meta")
        folded = _folded(f"derive {name}", derived.steps, [start], Context(sizes, 1, _no_sibling), problems)
        if folded:
            made[name] = folded[0]
        return bool(folded)

    def _start(self, derived: Derived, made: Mapping[str, Tensor], sizes: Names, length: int) -> Tensor | str:
        match derived.kind:
            case "tie":
                return made.get(derived.argument, f"{derived.argument} is missing")
            case "attr":
                known = ", ".join(self.attributes) or "none"
                missing = f"no tensor {derived.argument} outside of the state dict (there: {known}); record a golden"
                return self.attributes.get(derived.argument, missing)
            case "ones":
                return next(iter(made.values())).new_ones(int(sizes["d_model"]))
        if not length:
            return "the table is computed and its length not known; give --set max_length=N"
        cut = [Context(sizes, 1, _no_sibling).whole(s.argument) for s in derived.steps if s.name == "slice"]
        return sinusoid(derived.argument, length + sum(cut), int(sizes["d_model"]))

    def _post(
        self, place: str, text: str, made: dict[str, Tensor], names: Mapping[str, Names], problems: list[str]
    ) -> None:
        line = parse_post(text)
        found = [match.targets[0] for match in matches(line.rule, made)]
        if not found:
            problems.append(f"{place} {shortened(text)}: no tensor matches")
        changed = {}
        for name in found:

            def sibling(other: str, name: str = name) -> Tensor:
                beside = f"{name.rpartition('.')[0]}.{other}"
                if beside not in made:
                    raise CheckpointError(f"needs {beside}, which is missing")
                return made[beside]

            context = Context(names[side_of(name)], 1, sibling)
            if folded := _folded(f"{place}: {name}", line.steps, [made[name]], context, problems):
                changed[name] = folded[0]
        made.update(changed)
        self.uses.append(LineUse(f"post {text}", (), tuple(changed)))


def _of_layers(target: str, made: Iterable[str]) -> list[str]:
    """Return the names that a target of `derive` stands for: with {i} one for each layer that the map has made."""
    if "{i}" not in target:
        return [target]
    before, after = target.split("{i}")
    indices = {name.removeprefix(before).split(".")[0] for name in made if name.startswith(before)}
    return [f"{before}{index}{after}" for index in sorted(indices, key=int)]


def _folded(
    place: str, steps: Sequence[Step], tensors: Sequence[Tensor], context: Context, problems: list[str]
) -> list[Tensor]:
    try:
        parts = run(steps, tensors, context)
    except (CheckpointError, ConfigError, RuntimeError, IndexError) as error:
        problems.append(f"{place} {list(tensors[0].shape)}: {str(error).splitlines()[0]}")
        return []
    if len(parts) != context.parts:
        problems.append(f"{place} becomes {len(parts)} tensors, the line names {context.parts}")
        return []
    return parts


def _no_sibling(name: str) -> Tensor:
    raise CheckpointError(f"has nothing beside it called {name}; add_scaled stands in post")
