"""Write the models of the benchmarks: python -m lengths MODEL FOLDER.

MODEL is a preset, `dates`, or a preset with `-lengths` after its name: a model of the same size that ends each text at
the length that its source asks for. With random weights a text ends anywhere or nowhere, so component 0 of the residual
stream is reserved: each source token carries its length there, the first cross-attention subtracts it from the
position, and the end-of-sequence logit reads the difference steeply. All other weights are as random as in the preset.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfexport.nn.transformer import Stack, Transformer

SUFFIX = "-lengths"
# Ids below are special tokens in every preset.
FIRST_TOKEN = 4
# Log-normal, like the lengths of sentences, within these bounds.
MEDIAN, SPREAD, SHORTEST, LONGEST = 28, 0.6, 5, 120
_LENGTHS = LONGEST - SHORTEST + 1
# The effect of one token: small in component 0 compared with the rest of the stream, large in the logit.
_UNIT, _STEEPNESS = 1 / 32, 1000.0


@dataclass(frozen=True)
class Text:
    """A source, and the number of tokens that the model generates for it, including the end."""

    source: list[int]
    length: int


def corpus(count: int, vocab: int) -> list[Text]:
    """Draw sources whose lengths are independent of those of their texts; always the same ones."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = _draw(draw)
        tokens = range(FIRST_TOKEN + length - SHORTEST, vocab, _LENGTHS)
        found.append(Text([draw.choice(tokens) for _ in range(_draw(draw))], length))
    return found


def _draw(draw: random.Random) -> int:
    while True:
        length = round(draw.lognormvariate(math.log(MEDIAN), SPREAD))
        if SHORTEST <= length <= LONGEST:
            return length


def build(name: str) -> Transformer:
    """Build the model with the sizes of a preset; pre-norm without final norms preserves component 0."""
    import torch

    from tfexport.nn.presets import build_preset
    from tfexport.nn.transformer import Transformer

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
    # A separate output table, because with a tied one the model would repeat its last token.
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
    # The token after position p, number p + 1, is the last one if p + 1.5 is above the requested length.
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
    from tfexport.nn.directory import load_model, save_model
    from tfexport.nn.presets import build_preset

    name, folder = sys.argv[1:]
    if name.endswith(SUFFIX):
        save_model(build(name.removesuffix(SUFFIX)), folder)
    elif name == "dates":
        save_model(load_model(Path(__file__).resolve().parent.parent / "models" / name), folder)
    else:
        save_model(build_preset(name), folder)
