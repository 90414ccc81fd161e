"""A model that ends each text at the length that its source asks for, and a corpus of such sources.

With random weights a text ends anywhere or nowhere, so the ends are made by hand. Component 0 of the residual stream is
kept clean: no layer writes to it but one head. Each source token brings its length there, the first cross-attention
subtracts it from the position, and the end-of-sequence logit reads what comes out, steeply. All else is as random as in
the preset, and as large.

As a program it writes the model directory: python -m comparison.lengths MODEL FOLDER.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from comparison.systems import FIRST_TOKEN

if TYPE_CHECKING:
    from tfexport.models.transformer import Stack, Transformer

# Behind the name of the preset that a model has its sizes from.
SUFFIX = "-lengths"
# Log-normal, as those of sentences are; what falls outside is drawn again.
MEDIAN, SPREAD, SHORTEST, LONGEST = 28, 0.6, 5, 120
_LENGTHS = LONGEST - SHORTEST + 1
# One token more or less: in component 0, small beside the rest of the stream, and in the logit, large beside others.
_UNIT, _STEEPNESS = 1 / 32, 1000.0


@dataclass(frozen=True)
class Text:
    """A source, and how many tokens the model generates for it, the end included."""

    source: list[int]
    length: int


def corpus(count: int, vocab: int) -> list[Text]:
    """Draw sources; their lengths and those of their texts are independent, and the same on every call and machine."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = _draw(draw)
        tokens = range(FIRST_TOKEN + length - SHORTEST, vocab, _LENGTHS)
        found.append(Text([draw.choice(tokens) for _ in range(_draw(draw))], length))
    return found


def equal_lengths(count: int, vocab: int) -> list[Text]:
    """Draw sources that are all as long as their texts, the median of a corpus."""
    draw = random.Random(0)
    tokens = range(FIRST_TOKEN + MEDIAN - SHORTEST, vocab, _LENGTHS)
    return [Text([draw.choice(tokens) for _ in range(MEDIAN)], MEDIAN) for _ in range(count)]


def _draw(draw: random.Random) -> int:
    while True:
        length = round(draw.lognormvariate(math.log(MEDIAN), SPREAD))
        if SHORTEST <= length <= LONGEST:
            return length


def build(name: str) -> Transformer:
    """Build the model with the sizes of a preset; pre-norm without final norms lets component 0 come through."""
    import torch

    from tfexport.models.presets import build_preset
    from tfexport.models.transformer import Transformer

    like = build_preset(name)
    decoder = like.config.decoder
    assert decoder is not None
    config = replace(
        like.config,
        encoder=replace(like.config.encoder, norm_place="pre"),
        decoder=replace(decoder, norm_place="pre"),
        tie_embeddings=False,
        tie_output=False,
    )
    model = Transformer.unfilled(config)
    # An output table of its own, or the token that was read last would be found again for ever.
    tables = {"out.weight": build_preset(name, seed=1).state_dict()["out.weight"]}
    model.load_state_dict({**like.state_dict(), **tables})
    with torch.no_grad():
        _end_as_asked(model)
    return model.eval()


def _end_as_asked(model: Transformer) -> None:
    import torch

    assert model.dec is not None
    assert model.out is not None
    assert model.dec.pos is not None
    for stack in (model.enc, model.dec):
        _clear(stack)
    asked = SHORTEST + torch.arange(model.config.source_vocab - FIRST_TOKEN) % _LENGTHS
    model.enc.embed.weight[FIRST_TOKEN:, 0] = asked * _UNIT / model.config.embedding_scale
    # The token behind position p is the last one, number p + 1, when p + 1.5 is above the length that was asked for.
    model.dec.pos[:, 0] = (torch.arange(len(model.dec.pos)) + 1.5) * _UNIT
    cross = model.dec.blocks[0].cross
    cross.v.weight[0] = 0
    cross.v.weight[0, 0] = 1
    cross.o.weight[0, 0] = -1
    model.out.weight[:, 0] = 0
    model.out.weight[model.config.tokens.eos] = 0
    model.out.weight[model.config.tokens.eos, 0] = _STEEPNESS / _UNIT
    for bias, at in ((cross.v.bias, 0), (model.out.bias, model.config.tokens.eos)):
        if bias is not None:
            bias[at] = 0


def _clear(stack: Stack) -> None:
    """Let nothing be in component 0, and no layer write to it."""
    assert stack.pos is not None
    stack.embed.weight[:, 0] = 0
    stack.pos[:, 0] = 0
    for block in stack.blocks:
        attentions = [block.self, *([block.cross] if hasattr(block, "cross") else [])]
        for linear in (block.ffn.fc2, *(attention.o for attention in attentions)):
            linear.weight[0] = 0
            if linear.bias is not None:
                linear.bias[0] = 0


if __name__ == "__main__":
    from tfexport.models.directory import save_model

    save_model(build(sys.argv[1].removesuffix(SUFFIX)), sys.argv[2])
