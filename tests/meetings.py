"""A model that translates who meets whom, with names outside of the vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from tests import tiny
from tfexport._io.names import TOKENIZER
from tfexport.contract import AlignmentHeads, TokenIds, Variant
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.config import model_spec
from tfexport.nn.directory import save_model
from tfexport.nn.eager import align
from tfexport.nn.transformer import Transformer

PAD, START, EOS, UNK = range(4)
NAMES = ("Ada", "Ben", "Cleo", "Dov", "Eve", "Finn")
DAYS = ("Monday", "Tuesday", "Friday")
WORDS = ("<pad>", "<s>", "</s>", "<unk>", *NAMES, *DAYS, "meets", "on", ":", "and")
ID = {word: number for number, word in enumerate(WORDS)}
HEAD = AlignmentHeads(layer=0, heads=(0,))
TEXTS = ["Zoë meets Ben on Friday", "Ada meets Xi on Monday", "Ólafur meets Nkechi on Tuesday"]
SAID = ["Friday : Zoë and Ben", "Monday : Ada and Xi", "Tuesday : Ólafur and Nkechi"]


def trained() -> Transformer:
    torch.manual_seed(0)
    config = tiny.config(
        encoder={"layers": 1},
        decoder={"layers": 1},
        source_vocab=len(WORDS),
        target_vocab=len(WORDS),
        tokens=TokenIds(pad=PAD, start=START, eos=EOS, unk=UNK),
        embedding_scale=32**0.5,
    )
    model, spec = Transformer(config).train(), model_spec(config, "fp32")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(120):
        names = torch.randint(ID["Ada"], ID["Finn"] + 1, (2, 64))
        one, two = torch.where(torch.rand(2, 64) < 0.4, UNK, names)
        day = torch.randint(ID["Monday"], ID["Friday"] + 1, (64,))
        word = {name: torch.full((64,), ID[name]) for name in ("meets", "on", "</s>", ":", "and", "<s>")}
        source = torch.stack((one, word["meets"], two, word["on"], day, word["</s>"]), 1)
        target = torch.stack((word["<s>"], day, word[":"], one, word["and"], two, word["</s>"]), 1)
        mask, read = torch.ones_like(source, dtype=torch.bool), target[:, :-1]
        loss = F.cross_entropy(model(source, mask, read).flatten(0, 1), target[:, 1:].flatten())
        # Guided alignment: train one head to attend to day and names.
        weights = align(model, HEAD, spec, (source, mask), read)
        loss = loss - weights[:, (0, 2, 4), (4, 0, 2)].log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.eval()


def made(path: Path, model: Transformer, alignment: AlignmentHeads | None, variant: Variant = "contrib") -> None:
    folder = path.with_name(f"{path.name}-model")
    save_model(model, folder)
    tiny.word_tokenizer(WORDS, eos=True).save(str(folder / TOKENIZER))
    export_bundle(str(folder), path, ExportConfig(variants=(variant,), alignment=alignment), verify=False)
