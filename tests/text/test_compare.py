"""Compare a tokenizer with recorded texts; errors name the cause of a difference."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tests.text.test_tokenizer import spec_of
from tfexport.errors import ParityError
from tfexport.text.compare import check_texts
from tfexport.text.config import TextConfig, TextSample
from tfexport.text.tokenizer import Tokenizer


def compared(output: str, *, strips: bool) -> None:
    """Compare a tokenizer whose tokens include the space before a word."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "▁one", "▁two", "▁three"]
    inner = Inner(models.WordLevel(dict(zip(words, range(7), strict=True)), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.add_special_tokens(words[:4])
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    inner.decoder = decoders.Sequence([spaces, decoders.Strip(" ", 1, 0)]) if strips else spaces
    sample = TextSample(text="one two", source_ids=(4, 5, 2), target_ids=(1, 5, 6, 2), output=output)
    text = TextConfig(source_suffix=(2,), samples=(sample,))
    check_texts(Tokenizer.parse([("words.json", inner.to_str().encode())], spec_of(inner), text=text))


def test_the_same_text_is_accepted() -> None:
    compared(" two three", strips=False)
    compared("two three", strips=True)


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("two three", r"remove strip\(\) from to_text"),
        ("two three!", "the decoder of your code"),
        (" TWO THREE", "only lower case"),
        (" two three </s>", "leave special tokens out of the text"),
        (" drei", "give the target's tokenizer with the decoder of your code"),
    ],
)
def test_another_text_is_refused_with_its_cause(output: str, remedy: str) -> None:
    with pytest.raises(ParityError) as caught:
        compared(output, strips=False)
    assert caught.value.subject.startswith("text 1 of 1")
    assert caught.value.problems[0].startswith("decoding: ")
    assert re.search(remedy, caught.value.remedy)
