"""A model of phrases: each token depends only on the token before it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch.nn import functional as F

from tests import tiny
from tfexport._io.names import TOKENIZER
from tfexport.contract import TokenIds
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer

PAD, START, EOS, UNK = range(4)
# A phrase that repeats without end, and one that ends.
ROUND = "once more we go round and come along where it was before".split()
ENDS = "this one says its few words".split()
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *ROUND, *ENDS, "other"]
ID = {word: number for number, word in enumerate(WORDS)}
MAX_LENGTH = 150


def ids(words: list[str] | str) -> list[int]:
    return [ID[word] for word in (words.split() if isinstance(words, str) else words)]


def followers() -> dict[int, int]:
    """Map each token to the next one."""
    goes_round, ends = ids([*ROUND, ROUND[0]]), [*ids(ENDS), EOS]
    return {START: goes_round[0], **dict(pairwise(goes_round)), **dict(pairwise(ends))}


def model() -> Transformer:
    """No layer adds anything to the embedding, and the projection maps it to the next token."""
    torch.manual_seed(0)
    made = Transformer(
        tiny.config(
            source_vocab=len(WORDS),
            target_vocab=len(WORDS),
            max_source_length=MAX_LENGTH,
            max_target_length=MAX_LENGTH,
            tokens=TokenIds(pad=PAD, start=START, eos=EOS, unk=UNK),
        )
    )
    assert made.dec is not None
    assert made.dec.pos is not None
    assert made.out is not None
    with torch.no_grad():
        made.dec.pos.zero_()
        for name, parameter in made.dec.named_parameters():
            if ".o." in name or ".fc2." in name:
                parameter.zero_()
        # The exporter must not merge biases that are equal in all layers.
        first, second = (dict(layer.named_parameters()) for layer in made.dec.layers)
        for name, parameter in second.items():
            if name.endswith(".bias"):
                parameter.copy_(first[name])
        embedded = F.layer_norm(made.dec.embed.weight * made.config.embedding_scale, (made.config.d_model,))
        for parameter in made.out.parameters():
            parameter.zero_()
        for token, after in followers().items():
            made.out.weight[after] += embedded[token]
    return made.eval()


def made(path: Path) -> None:
    """Export it with speculation, only for the CPU; its model directory is NAME-model."""
    directory, file = path.with_name(f"{path.name}-model"), path.with_name(f"{path.name}-{TOKENIZER}")
    tiny.word_tokenizer(WORDS).save(str(file))
    save_model(model(), directory, file)
    export_bundle(str(directory), path, ExportConfig(variants=("contrib",), speculation=True))
