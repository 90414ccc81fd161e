"""The tensors that `infer` answers with."""

from __future__ import annotations

from collections.abc import Sequence

from tfexport.model.result import Result
from tfexport.serve.protocol.asking import Answer
from tfexport.serve.protocol.errors import InvalidRequestError
from tfexport.serve.protocol.tensors import Tensor

# Each output with its datatype and rank: [sources, answers], ids with a third dimension.
OUTPUTS = {
    "text_output": ("BYTES", 2),
    "output_ids": ("INT64", 3),
    "output_lengths": ("INT64", 2),
    "scores": ("FP32", 2),
    "finish_reason": ("BYTES", 2),
}


def outputs_of(found: Sequence[Sequence[Answer]], pad: int) -> dict[str, Tensor]:
    """Return the outputs by name; no texts where token ids were asked with.

    Args:
        found: answers to each source, best first.
        pad: id that fills short rows of ids.

    Raises:
        InvalidRequestError: the sources have unequally many answers, which is no tensor.
    """
    if len(numbers := {len(one) for one in found}) > 1:
        raise InvalidRequestError(f"the sources have {min(numbers)} to {max(numbers)} alternatives; ask for each alone")
    answers = [answer for one in found for answer in one]
    shape, lengths = (len(found), len(found[0])), [len(one.token_ids) for one in answers]
    longest = max(lengths)
    padded = [token for one in answers for token in (*one.token_ids, *[pad] * (longest - len(one.token_ids)))]
    values: dict[str, Sequence[object]] = {
        "text_output": [one.text for one in answers if isinstance(one, Result)],
        "output_ids": padded,
        "output_lengths": lengths,
        "scores": [one.score for one in answers],
        "finish_reason": [one.finish_reason for one in answers],
    }
    return {
        name: Tensor(name, datatype, shape if rank == 2 else (*shape, longest), values[name])
        for name, (datatype, rank) in OUTPUTS.items()
        if values[name]
    }
