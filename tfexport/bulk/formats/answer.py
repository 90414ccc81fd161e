"""What comes of a row: answers, or what is wrong with it; and the columns and the JSON that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.errors import InputError

# What stands behind the name of the output column.
SUFFIXES = ("", "_score", "_finish_reason", "_error")


@dataclass(frozen=True)
class Answer:
    """What comes of a row.

    Attributes:
        texts: what was generated, best first; none where the row is wrong.
        scores: of each, as `tfexport.model.result.Result` has them.
        finish_reasons: of each.
        error: what is wrong with the row; None for nothing.
    """

    texts: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None

    def to_json(self) -> str:
        """Spell it in one line."""
        if self.error is not None:
            return json.dumps({"error": self.error}, ensure_ascii=False)
        return json.dumps([self.texts, self.scores, self.finish_reasons], ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Answer:
        """Read what `to_json` wrote."""
        data = json.loads(line)
        return (
            cls(error=data["error"]) if isinstance(data, dict) else cls(tuple(data[0]), tuple(data[1]), tuple(data[2]))
        )


@dataclass(frozen=True)
class AnswerColumns:
    """The columns that answers are written to.

    Attributes:
        name: of the first.
        are_lists: whether a row has several answers, so that each column holds lists.
    """

    name: str
    are_lists: bool

    @property
    def names(self) -> list[str]:
        """Names of all, in order."""
        return [self.name + suffix for suffix in SUFFIXES]

    def values(self, answer: Answer) -> dict[str, Any]:
        """Return what a row has in each column; None where there is nothing to say."""
        sides: Sequence[Sequence[Any]] = (answer.texts, answer.scores, answer.finish_reasons)
        if answer.error is not None:
            values: list[Any] = [None, None, None]
        elif self.are_lists:
            values = [list(side) for side in sides]
        else:
            values = [side[0] for side in sides]
        return dict(zip(self.names, [*values, answer.error], strict=True))

    def check(self, columns: Mapping[str, bool] | Sequence[str], name: str) -> None:
        """Refuse names that the input has already.

        Args:
            columns: of the input.
            name: of the input, for the error.

        Raises:
            InputError: lists them.
        """
        taken = [column for column in self.names if column in columns]
        if taken:
            raise InputError(
                f"{name} has the column {', '.join(taken)} already, which the answers would get; "
                "choose another name with --output-column"
            )
