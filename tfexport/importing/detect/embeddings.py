"""What lies outside the layers: embeddings, tables of positions, norms around the stack, the output projection."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.importing.detect import words
from tfexport.importing.detect.parts import Part
from tfexport.importing.detect.roles import FAR, LIKELY, POSSIBLE, Choice, Reading, norm_lines
from tfexport.importing.reference.golden import Golden
from tfexport.importing.reference.randomise import is_position_table

SIDES = ("enc", "dec")
# Rows that a learned table may keep in front of position 0: for padding, and what fairseq's heirs add to it.
_OFFSETS = (2, 1)
# Every norm may stand in several places; those behind so many are not read.
_MOST_NORMS = 5


@dataclass(frozen=True)
class EmbeddingsAndHead:
    """The readings of everything outside the layers.

    `derive` are the tensors that have no key of their own, `unread` the parts
    that none of the choices takes.
    """

    choices: tuple[Choice, ...]
    derive: Mapping[str, str]
    has_table: bool
    unread: tuple[Part, ...]


class Reader:
    """Sorts the parts outside the layers by what they are."""

    def __init__(
        self,
        parts: Sequence[Part],
        tensors: Mapping[str, Tensor],
        d_model: int,
        sides: Sequence[str],
        golden: Golden | None,
    ) -> None:
        """Sort them.

        Args:
            parts: those outside of the layers.
            tensors: the state dict.
            d_model: width of the model.
            sides: "enc" and, with a decoder, "dec".
            golden: tells the vocabularies.
        """
        self.tensors, self.d_model, self.sides = tensors, d_model, sides
        self.vocab = golden.logits.shape[2] if golden is not None and golden.logits is not None else None
        self.largest_id = int(golden.source_ids.max()) if golden is not None else 0
        self.skip = words.common(key.split(".") for key in tensors)
        self.choices: list[Choice] = []
        self.derive: dict[str, str] = {}
        self.unread: list[Part] = []
        tables = [part for part in parts if self._is_table(part, parts)]
        transposed = [part for part in parts if self._is_transposed(part)]
        wide = [part for part in parts if part not in tables and part.is_matrix and part.shape[-1] == d_model]
        outputs = transposed + [part for part in wide if self._is_output(part)] if "dec" in sides else []
        if not outputs and "dec" in sides:
            outputs = self._likely_outputs(wide)
        embeddings = [part for part in wide if part not in outputs]
        if not tables:
            tables = self._likely_tables(embeddings)
        self._embeddings([part for part in embeddings if part not in tables])
        self._outputs(outputs, [part for part in parts if self._is_logit_bias(part)])
        self._tables(tables)
        self._norms([part for part in parts if self._is_norm(part)])
        used = {line.split(" ->")[0] for choice in self.choices for reading in choice for line in reading.lines}
        self.unread += [part for part in parts if not set(part.keys) & used and part not in self.unread]

    def found(self) -> EmbeddingsAndHead:
        """Return what was found."""
        lines = [line for choice in self.choices for reading in choice for line in reading.lines]
        has_table = any(_target(line).endswith(".pos") for line in lines)
        return EmbeddingsAndHead(tuple(self.choices), self.derive, has_table, tuple(self.unread))

    def _side(self, part: Part) -> str | None:
        """Say which side a part belongs to; an encoder alone needs no word for it."""
        return words.side(".".join(part.keys[0].split(".")[self.skip :])) if len(self.sides) > 1 else "enc"

    def _is_table(self, part: Part, parts: Sequence[Part]) -> bool:
        sizes = [size for size in part.shape if size > 1]
        if part.weight is None or len(sizes) != 2 or sizes[1] != self.d_model or part.bias is not None:
            return False
        if set(part.words) & words.POSITION or is_position_table(self.tensors[part.weight]):
            return True
        # Beside embeddings that are modules, a parameter of its own is a table; so is one with an axis for the batch.
        wide = (other for other in parts if other.is_matrix and other.shape[-1] == self.d_model)
        is_usual = any(not _is_bare(other) and not self._is_output(other) for other in wide)
        is_embedding = bool(set(part.words) & words.EMBEDDING) and len(part.shape) == 2
        return _is_bare(part) and not is_embedding and (is_usual or len(part.shape) > 2)

    def _is_transposed(self, part: Part) -> bool:
        """Say whether a matrix is stored [d_model, vocab], as x @ W has it."""
        if len(part.shape) != 2 or part.shape[0] != self.d_model or part.shape[1] == self.d_model:
            return False
        return _is_bare(part) and part.shape[1] in (part.bias_size, self.vocab)

    def _is_output(self, part: Part) -> bool:
        if part.bias is not None:
            return True
        found = set(part.words)
        return bool(found & words.OUTPUT) and not found & words.EMBEDDING and self.vocab in (None, part.shape[0])

    def _likely_outputs(self, wide: Sequence[Part]) -> list[Part]:
        """Without a word for it: the last of three tables; with two, the output is one of them."""
        silent = [part for part in wide if not set(part.words) & words.EMBEDDING]
        return silent[-1:] if len(wide) > 2 else []

    def _likely_tables(self, embeddings: Sequence[Part]) -> list[Part]:
        """Without a word for it: what has too few rows for the ids, or what is left beside embeddings named so."""
        small = [part for part in embeddings if part.shape[0] <= self.largest_id and part.shape[0] != self.vocab]
        if small:
            return small
        silent = [part for part in embeddings if not set(part.words) & (words.EMBEDDING | {"tok", "token", "tokens"})]
        named = [part for part in embeddings if part not in silent]
        # One table that has every id serves both sides.
        is_joint = len(named) == 1 and self.vocab in (None, named[0].shape[0]) and self.largest_id < named[0].shape[0]
        is_enough = len(self.sides) < len(embeddings) or is_joint
        return silent if 0 < len(silent) <= len(self.sides) and is_enough else []

    def _is_logit_bias(self, part: Part) -> bool:
        is_bias = part.weight is None and part.is_vector
        return is_bias and max(part.shape, default=1) != 1 and self.vocab in (None, max(part.shape))

    def _is_norm(self, part: Part) -> bool:
        size = max(part.shape, default=1)
        # One number alone is a norm's where it has both, and a constant of the code otherwise.
        is_norm = size == self.d_model or (size == 1 and part.bias is not None)
        return part.is_vector and part.weight is not None and is_norm

    def _embeddings(self, parts: Sequence[Part]) -> None:
        """Give each side its embedding; equal tables under other names count as the same."""
        own = {side: [part for part in parts if self._side(part) == side] for side in self.sides}
        common = [part for part in parts if self._side(part) is None]
        free = [side for side in self.sides if not own[side]]
        for part in list(common):
            twin = next((s for s in self.sides for other in own[s] if self._same(part, other)), None)
            if twin is not None:
                own[twin].append(part)
                common.remove(part)
        for side in self.sides:
            if own[side]:
                lines = [f"{part.weight} -> {side}.embed.weight" for part in own[side][:1]]
                lines += [
                    f"{part.weight} -> {side}.embed.weight" for part in own[side][1:] if self._same(part, own[side][0])
                ]
                self.choices.append((Reading(tuple(lines)),))
        if len(free) == 2 and len(common) >= 2:
            first, second = sorted(common, key=lambda part: part.place)[:2]
            self.choices.append(
                tuple(
                    Reading((f"{a.weight} -> enc.embed.weight", f"{b.weight} -> dec.embed.weight"), cost)
                    for cost, (a, b) in enumerate(((first, second), (second, first)))
                    if self.vocab in (None, b.shape[0])
                )
            )
        elif free and common:
            self.choices.append(
                tuple(Reading((f"{part.weight} -> {free[0]}.embed.weight",), i) for i, part in enumerate(common))
            )
            if len(free) == 2:
                self.derive["dec.embed.weight"] = "tie enc.embed.weight"
        elif free and len(self.sides) == 2:
            other = "dec" if free[0] == "enc" else "enc"
            if free == ["dec"]:
                self.derive["dec.embed.weight"] = f"tie {other}.embed.weight"
            elif own["dec"]:
                # One table for both sides, kept by the decoder.
                self.derive["enc.embed.weight"] = "tie dec.embed.weight"

    def _same(self, one: Part, other: Part) -> bool:
        a, b = self.tensors[one.weight or ""], self.tensors[other.weight or ""]
        return a.shape == b.shape and torch.equal(a, b)

    def _outputs(self, outputs: Sequence[Part], biases: Sequence[Part]) -> None:
        if "dec" not in self.sides:
            return
        if outputs:
            self.choices.append(
                tuple(
                    Reading(
                        (
                            f"{part.weight} -> out.weight" + self._output_ops(part),
                            *([f"{part.bias} -> out.bias"] if part.bias else []),
                        ),
                        cost,
                        tuple(key for other in outputs if other is not part for key in other.keys),
                    )
                    for cost, part in enumerate(outputs)
                )
            )
        else:
            self.derive["out.weight"] = "tie dec.embed.weight"
        if biases and not any(part.bias for part in outputs):
            self.choices.append((Reading((f"{biases[0].bias} -> out.bias |> squeeze",)),))

    def _output_ops(self, part: Part) -> str:
        if len(part.shape) > 2:
            return " |> squeeze"
        return " |> transpose" if self._is_transposed(part) else ""

    def _tables(self, tables: Sequence[Part]) -> None:
        by_side: dict[str | None, list[Part]] = {}
        for part in tables:
            by_side.setdefault(self._side(part), []).append(part)
        common = by_side.get(None, [])
        if len(common) >= 2 and not by_side.keys() - {None}:
            by_side = dict(zip(self.sides, ([part] for part in common), strict=False))
            common = []
        if len(common) == 1 and len(by_side.keys() - {None}) == 1:
            # The other side's, whose name has no known word.
            by_side |= {side: common for side in self.sides if side not in by_side}
            common = []
        for side in self.sides:
            own = by_side.get(side) or (common if side == "enc" else [])
            if own:
                self.choices.append(self._table_choice(own[0], side))
        given = {side for side in self.sides if by_side.get(side) or (common and side == "enc")}
        if given == {"enc"} and "dec" in self.sides:
            self.derive["dec.pos"] = "tie enc.pos"
        elif given == {"dec"}:
            self.derive["enc.pos"] = "tie dec.pos"

    def _table_choice(self, part: Part, side: str) -> Choice:
        assert part.weight is not None
        ops = " |> squeeze" if len(part.shape) > 2 else ""
        line = f"{part.weight} -> {side}.pos{ops}"
        if is_position_table(self.tensors[part.weight]):
            return (Reading((line,)), *(Reading((f"{line} |> slice {rows}",), FAR) for rows in _OFFSETS))
        return (Reading((line,)), *(Reading((f"{line} |> slice {rows}",), POSSIBLE) for rows in _OFFSETS))

    def _norms(self, norms: Sequence[Part]) -> None:
        """A norm stands behind the embedding or behind the last layer, of one side or of both; or it is not used."""
        options = [self._norm_options(part, norms) for part in norms[:_MOST_NORMS]]
        readings = []
        for picked in itertools.product(*options):
            targets = [target for reading in picked for line in reading.lines if (target := _target(line))]
            if len(set(targets)) == len(targets) and self._is_consistent(targets):
                lines, ignored = (tuple(x for one in picked for x in getattr(one, of)) for of in ("lines", "ignored"))
                readings.append(Reading(lines, sum(one.cost for one in picked), ignored))
        if norms and readings:
            self.choices.append(tuple(sorted(readings, key=lambda reading: reading.cost)))

    def _norm_options(self, part: Part, norms: Sequence[Part]) -> list[Reading]:
        """List the places of one norm, with what its words say and the order of those that name no side."""
        is_embedding = bool(set(part.words) & words.EMBEDDING)
        unusual = FAR if is_embedding or set(part.words) & words.FINAL else POSSIBLE
        costs = {"emb_norm": LIKELY if is_embedding else unusual, "norm": unusual if is_embedding else LIKELY}
        side = self._side(part)
        if side is not None:
            options = [Reading(norm_lines(part, f"{side}.{place}"), cost) for place, cost in costs.items()]
        else:
            # The last one stands behind the decoder, one before it behind the encoder; one embedding serves both sides.
            silent = [n for n in norms if self._side(n) is None and not set(n.words) & words.EMBEDDING]
            usual = {"dec": silent[-1:] == [part], "enc": len(silent) > 1 and silent[0] is part}
            options = [
                Reading(norm_lines(part, f"{owner}.norm"), costs["norm"] + (LIKELY if usual[owner] else POSSIBLE))
                for owner in self.sides
            ]
            options += [
                Reading((*norm_lines(part, f"enc.{place}"), *_tied_norm(part, place)), cost + more)
                for (place, cost), more in zip(costs.items(), (LIKELY, POSSIBLE), strict=True)
            ]
        return [*sorted(options, key=lambda reading: reading.cost), Reading((), 2 * FAR, tuple(part.keys))]

    def _is_consistent(self, targets: Sequence[str]) -> bool:
        """Both sides have a norm behind the embedding, or none has."""
        has = {side for side in self.sides if any(target.startswith(f"{side}.emb_norm") for target in targets)}
        return not has or has == set(self.sides)


def _is_bare(part: Part) -> bool:
    return part.weight is not None and words.is_bare(part.weight)


def _target(line: str) -> str:
    """Return the canonical name that a line of the map or of `derive` gives."""
    return line.removeprefix("derive ").split(" = ")[0].split(" -> ")[-1].split(" |> ")[0]


def _tied_norm(part: Part, place: str) -> tuple[str, ...]:
    kinds = (kind for key, kind in ((part.weight, "weight"), (part.bias, "bias")) if key is not None)
    return tuple(f"derive dec.{place}.{kind} = tie enc.{place}.{kind}" for kind in kinds)
