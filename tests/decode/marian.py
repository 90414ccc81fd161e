"""A tiny random Marian with varied output, a session with its weights, and options as in transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import GenerationConfig, MarianMTModel, PreTrainedTokenizerFast

from tests.decode.foreign import marian_config
from tests.nn.foreign import canonical
from tfexport.generation import DecodeConfig
from tfexport.runtime.eager import EagerSession

# As in Marian: end 0, padding last and also the start of the decoder.
EOS, PAD, VOCAB = 0, 47, 48
NUM_TEXTS = 100
# Every token but the special ones has one to three of four letters. The last is not a token of the model: transformers
# uses it to find out what a token adds to a text.
LETTERS = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("stop", repeat=size)][: VOCAB - 2]
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({token: i for i, token in enumerate(["</s>", *LETTERS, "<pad>", "abcdef"])})),
    eos_token="</s>",
    pad_token="<pad>",
)
TOKENIZER.backend_tokenizer.decoder = Fuse()


def text_of(token_ids: Sequence[int]) -> str:
    """Decode with special tokens, as transformers does to find stop strings."""
    return str(TOKENIZER.decode(list(token_ids)))


@dataclass(frozen=True)
class Pair:
    theirs: MarianMTModel
    session: EagerSession
    sources: list[list[int]]


def make_pair() -> Pair:
    torch.manual_seed(0)
    config = marian_config(encoder_layers=1, forced_eos_token_id=None, tie_word_embeddings=False)
    # float64 on both sides gives logits that are equal in float32, so that every id must agree.
    theirs = MarianMTModel(config).double().eval()
    theirs.model.shared = theirs.model.encoder.embed_tokens  # transformers leaves it random and unused
    with torch.no_grad():
        make_talkative(theirs)
    return Pair(theirs, EagerSession(canonical(theirs)), random_sources())


def make_talkative(model: MarianMTModel) -> None:
    """Sharpen attention and scale logits, so that texts differ and end at many lengths."""
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.mul_(4)
        if "fc2" in name:
            parameter.mul_(0.3)
    ids = torch.randint(1, PAD, (256, 12))
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(0)).logits
    scale = 1.5 / logits.std((0, 1))
    model.lm_head.weight.mul_(scale[:, None])
    model.final_logits_bias.copy_(-logits.mean((0, 1)) * scale)
    model.final_logits_bias[0, EOS] += 1.5


def random_sources() -> list[list[int]]:
    rng = np.random.default_rng(4)  # with most seeds more texts contain "stop"
    return [rng.integers(1, PAD, rng.integers(1, 13)).tolist() for _ in range(NUM_TEXTS)]


def their_settings(config: DecodeConfig) -> GenerationConfig:
    """Convert a configuration to one of transformers, which uses None for options that are not set."""
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in config.to_dict().items()}
    assert given.pop("seed") == 0
    assert not given.pop("return_alternatives")
    given.pop("prefix_bias_beta")
    given |= {"bad_words_ids": [list(word) for word in config.bad_words_ids]}
    given |= {"sequence_bias": [[list(ids), bias] for ids, bias in config.sequence_bias]}
    own = {"eos_token_id": EOS, "decoder_start_token_id": PAD}
    given |= {name: token for name, token in own.items() if given[name] is None}
    lists = ("suppress_tokens", "bad_words_ids", "stop_strings", "min_new_tokens", "sequence_bias")
    given |= {name: given[name] or None for name in lists}
    return GenerationConfig(**given, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True)
