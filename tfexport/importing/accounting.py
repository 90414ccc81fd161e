"""Account for every tensor of a checkpoint: used, constant or ignored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from torch import Tensor

from tfexport.errors import CheckpointError, ParityError, raise_all, shortened
from tfexport.importing._buffers import buffer_kind
from tfexport.importing._files import LeftOut
from tfexport.importing.layout.apply import LineUse, unmatched
from tfexport.importing.layout.layout import Layout

_MAX_NAMES = 40
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LABELS = {"used": "used", "folded": "folded", "buffer": "constant", "ignored": "ignored"}
Kind = Literal["used", "folded", "buffer", "ignored", "unexplained"]


class Use(NamedTuple):
    """What the import does with a tensor, or with `number` tensors of one entry."""

    kind: Kind
    reason: str = ""
    size: int = 0
    number: int = 1

    def __str__(self) -> str:
        several = f", {self.number} tensors" if self.number > 1 else ""
        return f"{self.kind}: {self.reason}{several}" if self.reason else self.kind


class Account:
    """The use of every tensor of a checkpoint, by name."""

    def __init__(self, left_out: Iterable[LeftOut]) -> None:
        self.uses: dict[str, Use] = {}
        for name, reason, size, number in left_out:
            self.uses[name] = Use("ignored" if reason else "unexplained", reason, size, number)

    def ignore(self, patterns: Sequence[str], tensors: Mapping[str, Tensor], recorded: Collection[str]) -> set[str]:
        """Count the tensors that match the user's patterns as ignored; return them."""
        names = dict.fromkeys([*tensors, *self.uses, *recorded])
        found = {name: pattern for pattern in patterns for name in names if fnmatchcase(name, pattern)}
        unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        problems = [f"--ignore {shortened(pattern)} matches no tensor" for pattern in unused]
        raise_all(CheckpointError, "import", problems, remedy="compare it with the names in the checkpoint")
        for name, pattern in found.items():
            if name in tensors or name in self.uses:
                number = self.uses[name].number if name in self.uses else 1
                self.uses[name] = Use("ignored", f"--ignore {pattern}", number=number)
        return set(found)

    def explain(
        self, layout: Layout, tensors: Mapping[str, Tensor], own: Collection[str], *, by_layout: bool
    ) -> tuple[str, ...]:
        """Explain the tensors that no line of a layout matches.

        Returns the buffers that the layout does not ignore. Only tensors with names in `own` are counted; the others
        are those of the reference outputs. If `by_layout` is True, the `ignore` of the layout explains tensors. That of
        a search does not. If a line matches no tensor, the layout is of another model, which `apply_layout` reports.
        """
        spare, ignored, is_whole = unmatched(layout, tensors)
        kinds = {name: buffer_kind(name, tensors[name]) for name in (*spare, *ignored)}
        self.uses |= {name: Use("buffer", kind) for name, kind in kinds.items() if kind and name in own}
        if by_layout:
            explained = Use("ignored", f"layout {layout.name}")
            self.uses |= {name: explained for name in ignored if not kinds[name] and name in own}
        if is_whole:
            left = [name for name, kind in kinds.items() if not kind and name in own and name not in self.uses]
            self.uses |= {name: Use("unexplained", size=tensors[name].numel()) for name in left}
        return tuple(name for name in spare if kinds[name])

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a ParityError that lists unexplained tensors and their share."""
        left = {name: use for name, use in self.uses.items() if use.kind == "unexplained"}
        if not left:
            return
        size = sum(use.size for use in left.values())
        others = sum(tensor.numel() for name, tensor in tensors.items() if name not in left)
        share = size / (size + others)
        raise ParityError(
            f"{_counted(left)} with {share:.2%} of all weights would be left out, and nothing explains why: "
            f"{_listed(left)}",
            subject="import",
            remedy="write a layout that maps them, record the logits of a head with num_labels, or leave them out with "
            "--ignore PATTERN if the model runs without",
        )

    def apply(self, lines: Sequence[LineUse], tensors: Collection[str]) -> None:
        """Count the tensors that lines of a layout used or folded."""
        changed = {name for use in lines if use.line.startswith("post ") for name in use.targets}
        for use in lines:
            kind: Kind = "folded" if " |> " in use.line or not changed.isdisjoint(use.targets) else "used"
            self.uses |= {name: Use(kind) for name in use.sources if name in tensors}

    def texts(self) -> dict[str, str]:
        """Return each use as text, for the certificate."""
        return {name: str(use) for name, use in self.uses.items()}

    def summary(self) -> str:
        """Return one line with the number of tensors of each use."""
        parts = []
        for kind, label in _LABELS.items():
            uses = [use for use in self.uses.values() if use.kind == kind]
            reasons = Counter[str]()
            for use in uses:
                reasons[use.reason] += use.number
            why = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if reason)
            parts += [f"{reasons.total()} {label}" + (f" ({why})" if why else "")] if uses else []
        return f"tensors of the checkpoint: {', '.join(parts)}"


def check_same(
    recorded: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    is_known: Callable[[str], bool],
    reference: str,
    name: str,
) -> None:
    """Raise a ParityError if names or shapes of weights differ from the recorded."""

    def only_in(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
        left = {key: tensor for key, tensor in one.items() if key not in other and not is_known(key)}
        return [key for key, tensor in left.items() if _counts(key, tensor)]

    missing, more = only_in(recorded, tensors), only_in(tensors, recorded)
    more = [key for key in more if tensors[key].numel() > 1]
    problems = [f"{name} lacks {_counted(missing)} of the recorded model: {_listed(missing)}"] if missing else []
    problems += [f"{name} has {_counted(more)} more: {_listed(more)}"] if more else []
    problems += [
        f"{key[:120]} is {list(tensors[key].shape)}, recorded as {list(tensor.shape)}"
        for key, tensor in recorded.items()
        if key in tensors and tensors[key].shape != tensor.shape and not is_known(key) and _counts(key, tensor)
    ]
    remedy = "record again with this checkpoint loaded, or leave out what the model does not use with --ignore PATTERN"
    raise_all(ParityError, f"{reference}: is of another model than {name}", problems, remedy=remedy)


def _counts(key: str, tensor: Tensor) -> bool:
    return buffer_kind(key, tensor) in ("", "single number")


def only_buffers(patterns: Iterable[str], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the patterns that match only constant buffers."""
    weights = [name for name, tensor in tensors.items() if not buffer_kind(name, tensor)]
    return tuple(pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in weights))


def _counted(names: Collection[str]) -> str:
    return f"{len(names)} tensors" if len(names) > 1 else "1 tensor"


def _listed(names: Collection[str]) -> str:
    """List names; those that differ only in numbers of layers are one pattern."""
    patterns = Counter(_LAYER.sub("*", name) for name in names)
    merged = list(dict.fromkeys(one if patterns[one := _LAYER.sub("*", name)] > 1 else name for name in names))
    shown = ", ".join(name[:120] for name in merged[:_MAX_NAMES])
    return shown + (f" and {len(merged) - _MAX_NAMES} more" if len(merged) > _MAX_NAMES else "")
