"""Read embeddings, position tables, norms and outputs outside of the layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tfexport.importing._buffers import is_position_table
from tfexport.importing.detect import _keys
from tfexport.importing.detect._keys import Part
from tfexport.importing.detect._layers import FAR, LIKELY, POSSIBLE, Choice, Reading, unread
from tfexport.importing.reference.outputs import ReferenceOutputs

# Rows that a learned table may have before position 0: the padding id plus 1, as in fairseq, or one row.
_OFFSETS = (2, 1)
# Each norm has several possible places, so further norms are not read.
_MAX_NORMS = 5


def target_of(line: str) -> str:
    """Return the canonical name that a line of `map` or `derive` makes."""
    return line.removeprefix("derive ").split(" = ")[0].split(" -> ")[-1].split(" |> ")[0]


class Outside:
    def __init__(
        self,
        parts: Sequence[Part],
        tensors: Mapping[str, Tensor],
        d_model: int,
        sides: Sequence[str],
        reference: ReferenceOutputs | None,
    ) -> None:
        self.tensors, self.d_model, self.sides = tensors, d_model, sides
        self.vocab = reference.logits.shape[-1] if reference is not None and reference.logits is not None else None
        self.output = "out" if "dec" in sides else "head" if self.vocab else ""
        self.reads_features = reference is not None and reference.source_ids.dim() == 3
        ids = None if reference is None else reference.target_ids if self.reads_features else reference.source_ids
        self.largest_id = 0 if ids is None else int(ids.max())
        self.skip = _keys.common(key.split(".") for key in tensors)
        self.choices: list[Choice] = []
        self.derive: list[str] = []
        tables = [part for part in parts if self._is_table(part, parts)]
        transposed = [part for part in parts if self._is_transposed(part)]
        wide = [part for part in parts if part not in tables and part.is_matrix and part.shape[-1] == d_model]
        outputs = [*transposed, *(part for part in wide if self._is_output(part))] if self.output else []
        if not outputs and self.output and len(wide) > 2:
            # If no name shows the output, it is the last of three tables. With two tables, it is tied to one of them.
            outputs = [part for part in wide if not part.about(_keys.EMBEDDING)][-1:]
        # In an encoder, a matrix with a bias can only be a head, also if its logits are not recorded.
        embeddings = [part for part in wide if part not in outputs and ("dec" in sides or part.bias is None)]
        tables = tables or self._likely_tables(embeddings)
        self._embeddings([part for part in embeddings if part not in tables])
        if self.output:
            self._outputs(outputs, [p for p in parts if p.weight is None and p.is_vector and self._is_vocab(p)])
        self._tables(tables)
        self._norms([part for part in parts if self._is_norm(part)])
        lines = [line for choice in self.choices for reading in choice for line in reading.lines]
        used = {line.split(" ->")[0] for line in lines}
        self.has_table = any(target_of(line).endswith(".pos") for line in lines)
        self.has_norm = any(".norm." in line for choice in self.choices if choice for line in choice[0].lines)
        self.choices = [choice for choice in self.choices if choice]
        self.choices.append((unread([part for part in parts if not set(part.keys) & used]),))

    def _side(self, part: Part) -> str | None:
        return _keys.side(".".join(part.keys[0].split(".")[self.skip :])) if len(self.sides) > 1 else "enc"

    def _is_table(self, part: Part, parts: Sequence[Part]) -> bool:
        sizes = [size for size in part.shape if size > 1]
        if part.weight is None or len(sizes) != 2 or sizes[1] != self.d_model or part.bias is not None:
            return False
        if part.about(_keys.POSITION) or is_position_table(self.tensors[part.weight]):
            return True
        # A bare parameter is a table if the embeddings are modules, or if it has an axis for the batch.
        wide = (other for other in parts if other.is_matrix and other.shape[-1] == self.d_model)
        is_usual = any(not _keys.is_bare(other.weight or "") and not self._is_output(other) for other in wide)
        is_embedding = part.about(_keys.EMBEDDING) and len(part.shape) == 2
        return _keys.is_bare(part.weight) and not is_embedding and (is_usual or len(part.shape) > 2)

    def _is_transposed(self, part: Part) -> bool:
        # Stored as [d_model, vocab], for x @ W.
        if len(part.shape) != 2 or part.shape[0] != self.d_model or part.shape[1] == self.d_model:
            return False
        return part.weight is not None and _keys.is_bare(part.weight) and part.shape[1] in (part.bias_size, self.vocab)

    def _is_output(self, part: Part) -> bool:
        is_named = part.about(_keys.OUTPUT) and not part.about(_keys.EMBEDDING) and self.vocab in (None, part.shape[0])
        return part.bias is not None or is_named

    def _likely_tables(self, embeddings: Sequence[Part]) -> list[Part]:
        # By size: too few rows for the ids. By name: unnamed ones next to named embeddings.
        small = [part for part in embeddings if part.shape[0] <= self.largest_id and part.shape[0] != self.vocab]
        silent = [part for part in embeddings if not part.about(_keys.EMBEDDING | {"tok", "token", "tokens"})]
        named = [part for part in embeddings if part not in silent]
        # One embedding with all ids serves both sides.
        is_joint = len(named) == 1 and self.vocab in (None, named[0].shape[0]) and self.largest_id < named[0].shape[0]
        is_enough = len(self.sides) < len(embeddings) or is_joint
        return small or (silent if len(silent) <= len(self.sides) and is_enough else [])

    def _is_vocab(self, part: Part) -> bool:
        size = max(part.shape, default=1)
        return size != 1 and self.vocab in (None, size)

    def _is_norm(self, part: Part) -> bool:
        size = max(part.shape, default=1)
        # A single number belongs to a norm if it also has a bias; otherwise it is a constant of the code.
        is_norm = size == self.d_model or (size == 1 and part.bias is not None)
        return part.is_vector and part.weight is not None and is_norm

    def _embeddings(self, parts: Sequence[Part]) -> None:
        # Equal tables under different names count as one. An encoder of features has none.
        sides = ["dec"] if self.reads_features else self.sides
        own = {side: [part for part in parts if self._side(part) == side] for side in sides}
        shared: list[Part] = []
        for part in (part for part in parts if self._side(part) not in sides):
            twin = next((side for side in sides for other in own[side] if self._are_same(part, other)), None)
            (own[twin] if twin else shared).append(part)
        for side in sides:
            same = [part for part in own[side] if self._are_same(part, own[side][0])]
            if same:
                self.choices.append((Reading(tuple(f"{part.weight} -> {side}.embed.weight" for part in same)),))
        free = [side for side in sides if not own[side]]
        if len(free) == 2 and len(shared) >= 2:
            pairs = itertools.permutations(sorted(shared, key=lambda part: part.place)[:2])
            readings = [
                Reading((f"{a.weight} -> enc.embed.weight", f"{b.weight} -> dec.embed.weight"), cost)
                for cost, (a, b) in enumerate(pairs)
                if self.vocab in (None, b.shape[0])
            ]
            self.choices.append(tuple(readings))
            return
        if free and shared:
            readings = [Reading((f"{part.weight} -> {free[0]}.embed.weight",), i) for i, part in enumerate(shared)]
            self.choices.append(tuple(readings))
            free = free[1:]
        if free and len(sides) == 2:
            other = "enc" if free == ["dec"] else "dec"
            self.derive.append(f"derive {free[0]}.embed.weight = tie {other}.embed.weight")

    def _are_same(self, one: Part, other: Part) -> bool:
        return torch.equal(self.tensors[one.weight or ""], self.tensors[other.weight or ""])

    def _outputs(self, outputs: Sequence[Part], biases: Sequence[Part]) -> None:
        if not outputs and self.output == "out":
            self.derive.append("derive out.weight = tie dec.embed.weight")
        readings = []
        for cost, part in enumerate(outputs):
            ops = ["squeeze"] if len(part.shape) > 2 else ["transpose"] if self._is_transposed(part) else []
            others = tuple(key for other in outputs if other is not part for key in other.keys)
            readings.append(Reading(part.lines(self.output, *ops, bias_ops=()), cost, others))
        self.choices.append(tuple(readings))
        if biases and not any(part.bias for part in outputs):
            self.choices.append((Reading((f"{biases[0].bias} -> {self.output}.bias |> squeeze",)),))

    def _tables(self, tables: Sequence[Part]) -> None:
        given: dict[str, Part] = {}
        for part in tables:
            given.setdefault(self._side(part) or "", part)
        unnamed = [part for part in tables if self._side(part) is None]
        for side in self.sides:
            if side not in given and unnamed:
                given[side] = unnamed.pop(0)
            if side in given:
                key, shape = given[side].weight or "", given[side].shape
                line = f"{key} -> {side}.pos" + (" |> squeeze" if len(shape) > 2 else "")
                cost = FAR if is_position_table(self.tensors[key]) else POSSIBLE
                offsets = (Reading((f"{line} |> slice {rows}",), cost) for rows in _OFFSETS)
                self.choices.append((Reading((line,)), *offsets))
        for side, other in (("enc", "dec"), ("dec", "enc")):
            if side in given and other in self.sides and other not in given:
                self.derive.append(f"derive {other}.pos = tie {side}.pos")

    def _norms(self, norms: Sequence[Part]) -> None:
        # A norm follows the embedding or the last layer, of one side or of both, or it is not used.
        readings = []
        for picked in itertools.product(*(self._norm_places(part, norms) for part in norms[:_MAX_NORMS])):
            lines = tuple(line for reading in picked for line in reading.lines)
            targets = [target_of(line) for line in lines]
            embedded = {target[:3] for target in targets if ".emb_norm" in target}
            # Both sides have a norm after the embedding, or neither has.
            if len(set(targets)) == len(targets) and embedded in (set(), set(self.sides)):
                ignored = tuple(key for reading in picked for key in reading.ignored)
                readings.append(Reading(lines, sum(one.cost for one in picked), ignored))
        self.choices.append(tuple(sorted(readings, key=lambda reading: reading.cost)))

    def _norm_places(self, part: Part, norms: Sequence[Part]) -> list[Reading]:
        is_embedding = part.about(_keys.EMBEDDING)
        unusual = FAR if is_embedding or part.about(_keys.FINAL) else POSSIBLE
        costs = {"emb_norm": LIKELY if is_embedding else unusual, "norm": unusual if is_embedding else LIKELY}
        side = self._side(part)
        if side is not None:
            options = [Reading(part.norm_lines(f"{side}.{place}"), cost) for place, cost in costs.items()]
        else:
            # The last norm follows the decoder, the first the encoder. A norm after embeddings serves both.
            silent = [n for n in norms if self._side(n) is None and not n.about(_keys.EMBEDDING)]
            usual = {"dec": silent[-1:] == [part], "enc": len(silent) > 1 and silent[0] is part}
            options = [
                Reading(part.norm_lines(f"{owner}.norm"), costs["norm"] + (LIKELY if usual[owner] else POSSIBLE))
                for owner in self.sides
            ]
            for (place, cost), more in zip(costs.items(), (LIKELY, POSSIBLE), strict=True):
                kinds = [kind for key, kind in ((part.weight, "weight"), (part.bias, "bias")) if key is not None]
                tied = (f"derive dec.{place}.{kind} = tie enc.{place}.{kind}" for kind in kinds)
                options.append(Reading((*part.norm_lines(f"enc.{place}"), *tied), cost + more))
        return [*sorted(options, key=lambda reading: reading.cost), Reading(cost=2 * FAR, ignored=tuple(part.keys))]
