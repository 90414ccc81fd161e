"""`torch.nn.Transformer` as the tutorial has it, tokens first, with a tokenizer for each side."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.contract import ModelSpec, TokenIds
from tfexport.importing.own_module import OwnModule
from tfexport.importing.reference.texts import RecordedTexts
from tfexport.importing.text import Tokenizers
from tfexport.nn.cache import Cache, Cross, KeyValue, Source

HERE = Path(__file__).parent
SOURCE, TARGET = HERE / "words.json", HERE / "letters.json"
SOURCE_VOCAB, VOCAB, D, HEADS, LENGTH = 48, 30, 32, 4, 32
PAD, START, END = 0, 1, 2


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D, HEADS, 1, 1, 48, dropout=0.1)
        self.source, self.target = nn.Embedding(SOURCE_VOCAB, D), nn.Embedding(VOCAB, D)
        self.generator = nn.Linear(D, VOCAB)
        place, column = torch.arange(LENGTH)[:, None], torch.arange(0, D, 2)
        angle = place * torch.exp(-column * math.log(10000) / D)
        self.register_buffer("places", torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, None])

    def forward(self, src: Tensor, tgt: Tensor, src_padding_mask: Tensor) -> Tensor:
        """As in the tutorial: [len, batch] in, [len, batch, vocab] out."""
        later = self.transformer.generate_square_subsequent_mask(tgt.shape[0])
        found = self.transformer(
            self.embedded(self.source, src),
            self.embedded(self.target, tgt),
            tgt_mask=later,
            src_key_padding_mask=src_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(found)

    def embedded(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        return table(ids) * math.sqrt(D) + self.places[: len(ids)]

    # ---- what the export asks for

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        x = self.embedded(self.source, source_ids.T)
        memory = self.transformer.encoder(x, src_key_padding_mask=~source.mask).transpose(0, 1)
        return [KeyValue(*self.heads(layer.multihead_attn, memory, 1, 2)) for layer in self.transformer.decoder.layers]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        places = F.embedding(cache.positions, self.places[:, 0])
        x, scale = self.target(target_ids) * math.sqrt(D) + places, (D // HEADS) ** -0.5
        for i, layer in enumerate(self.transformer.decoder.layers):
            parts = (part.transpose(1, 2).flatten(0, 1) for part in self.heads(layer.self_attn, x, 0, 1, 2))
            found = cache.attend(i, *parts, scale=scale).unflatten(0, target_ids.shape)
            x = layer.norm1(x + layer.self_attn.out_proj(found))
            (query,) = self.heads(layer.multihead_attn, x, 0)
            found = cross.attend(i, query.transpose(1, 2).flatten(0, 1), scale=scale).unflatten(0, target_ids.shape)
            x = layer.norm2(x + layer.multihead_attn.out_proj(found))
            x = layer.norm3(x + layer.linear2(F.relu(layer.linear1(x))))
        return self.generator(self.transformer.decoder.norm(x[:, -1])).float()

    def heads(self, attention: nn.MultiheadAttention, x: Tensor, *parts: int) -> list[Tensor]:
        """Project to query (0), key (1) or value (2), [rows, heads, len, width]."""
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        made = (F.linear(x, weights[part], biases[part]) for part in parts)
        return [part.unflatten(-1, (HEADS, D // HEADS)).transpose(1, 2) for part in made]


def trained(model: Translator, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
    """Call the model as its training does."""
    return model(source_ids.T, target_ids.T, ~source_mask).transpose(0, 1)


def module() -> Translator:
    torch.manual_seed(0)
    made = Translator()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter) if parameter.dim() > 1 else parameter)
    return made


def make() -> OwnModule:
    source, target = (Tokenizer.from_file(str(path)) for path in (SOURCE, TARGET))
    spec = ModelSpec(
        d_model=D,
        source_vocab=SOURCE_VOCAB,
        max_source_length=LENGTH,
        tokens=TokenIds(pad=PAD, start=START, eos=END, unk=3),
        precision="fp32",
        vocab=VOCAB,
        layers=1,
        heads=HEADS,
        head_dim=D // HEADS,
        value_dim=D // HEADS,
        max_target_length=LENGTH,
    )
    texts = RecordedTexts(
        samples=["w7 w8 w9", "w5", "w12 w30 w31 w32 w33"],
        to_ids=lambda text: [START, *source.encode(text).ids, END],
        to_text=target.decode,
        start=START,
        end=END,
        max_new_tokens=8,
    )
    return OwnModule(module(), spec, trained, Tokenizers(SOURCE, TARGET), texts)
