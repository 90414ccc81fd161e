"""How much of a model's vocabulary a tokenizer can say: with far too little of it, it is that of another model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Inner

from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError
from tfexport.importing.formats.vocabulary import Side, vocabulary_size
from tfexport.text.vocabulary import BEYOND, border

# Vocabularies are padded to multiples, and have languages and sentinels that no text becomes: that is neither.
_PADDING = 256
_REFUSED, _WARNED = 0.5, 0.9


def check_coverage(raw: bytes, path: Path, spec: ModelSpec, side: Side | None) -> str:
    """Compare the number of a tokenizer's ids with the model's vocabulary.

    Args:
        raw: the tokenizer.json.
        path: where it came from, for messages.
        spec: of the model.
        side: of the model that it is for; None for both.

    Returns:
        A warning, empty where there is none.

    Raises:
        CheckpointError: no tokenizer.json, or it has less than half of the ids.
    """

    def refused(reason: str) -> CheckpointError:
        return CheckpointError(f"tokenizer {path}: is no tokenizer.json ({reason}); save the tokenizer again")

    with border(refused):
        vocab = Inner.from_str(raw.decode("utf-8")).get_vocab(with_added_tokens=True)
    ids = {i for i in vocab.values() if i < vocab.get(BEYOND, i + 1)}
    name, size = vocabulary_size(spec, side)
    if size - len(ids) <= _PADDING or len(ids) >= _WARNED * size:
        return ""
    said = f"tokenizer {path}: has {len(ids)} ids, the model's {name} is {size}"
    if len(ids) < _REFUSED * size:
        raise CheckpointError(f"{said}; give the tokenizer that the model was trained with")
    return f"warning: {said}; is it the tokenizer that the model was trained with?"
