"""State what a model's outputs were compared with, in one word and one sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["proven", "consistent", "unproven"]
REFERENCE, HUGGING_FACE = "reference outputs of the author's code", "Hugging Face's own code"
LOOP, MODULE = "the author's own generation loop", "the author's own module, without a generation loop"


class Proof(NamedTuple):
    """The status of a model, and the sentence that explains it."""

    status: Status
    sentence: str

    def __str__(self) -> str:
        return f"{self.status}: {self.sentence}"

    def to_dict(self) -> dict[str, str]:
        """Return the JSON values that certificates, manifests, reports and servers share."""
        return {"status": self.status, "proof": self.sentence}


def proof_of(passed: bool | None, author: str | None) -> Proof:
    """Return the proof of a comparison with `author`; None if there was none."""
    if passed is None:
        return Proof("unproven", "its outputs were never compared with a reference")
    if not passed:
        return Proof("unproven", "its outputs differ from the reference")
    if author is None:
        sentence = "its outputs agree with the eager model, which was never compared with the author's code"
        return Proof("consistent", sentence)
    return Proof("consistent" if author == MODULE else "proven", f"its outputs agree with {author}")
