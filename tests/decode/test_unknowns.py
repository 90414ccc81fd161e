"""Unknown tokens become the source's own words: by a model that learnt it, and by arithmetic on all it may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tfexport
from tests.meetings import EOS, ID, SAID, TEXTS, UNK, WORDS
from tfexport import ConfigError, InputError
from tfexport.cli import main


@pytest.mark.parametrize("backend", ["ort", "eager"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}])
def test_names_that_no_vocabulary_has_come_through(meetings: Path, backend: str, options: dict[str, Any]) -> None:
    with tfexport.load(meetings, backend=backend, threads=1) as model:
        plain = model.generate(TEXTS, **options)
        replaced = model.generate(TEXTS, replace_unknowns=True, batch_size=2, **options)
        step = options.get("num_return_sequences", 1)
        assert [one.text for one in replaced[::step]] == SAID
        assert [one.token_ids for one in replaced] == [one.token_ids for one in plain]
        # The tokenizer takes <unk> for special.
        assert [plain[0].text, plain[2 * step].text] == ["Friday : and Ben", "Tuesday : and"]
        assert model.generate(["Ada meets Ben on Friday"], replace_unknowns=True)[0].text == "Friday : Ada and Ben"


def test_the_command_line_says_the_same(meetings: Path) -> None:
    result = CliRunner().invoke(main, ["generate", str(meetings), *TEXTS, "--replace-unknowns"])
    assert (result.exit_code, result.stdout.splitlines()) == (0, SAID)


def test_a_text_still_ends_at_a_stop_string(meetings: Path) -> None:
    with tfexport.load(meetings, threads=1) as model:
        (one,) = model.generate(TEXTS[:1], replace_unknowns=True, stop_strings="and Be")
        assert (one.text, one.finish_reason) == ("Friday : Zoë and Be", "stop")


def test_every_unknown_is_the_piece_with_the_largest_weight(meetings: Path) -> None:
    """Drawn so flat that it says anything, beside NumPy on the alignment's own weights."""
    texts = ["Ada on meets", "Zoë : Ben and Xi", "and", "Friday Kofi Monday Ada Finn"]
    samples = 8
    with tfexport.load(meetings, threads=1) as model:
        options = {"do_sample": True, "temperature": 9.0, "top_k": 0, "num_return_sequences": samples}
        results = model.generate(texts, replace_unknowns=True, min_new_tokens=9, max_new_tokens=9, **options)
        texts = [text for text in texts for _ in range(samples)]
        ids = [[ID.get(word, UNK) for word in text.split()] for text in texts]
        found = model.align_ids([[*source, EOS] for source in ids], [one.token_ids for one in results])
    unknown = sum(one.token_ids.count(UNK) for one in results)
    assert 9 <= unknown < sum(len(one.token_ids) for one in results)
    for text, one, alignment in zip(texts, results, found, strict=True):
        words = text.split()
        best = alignment.weights[:, : len(words)].argmax(1)  # the end is nothing to copy
        said = [words[best[t]] if i == UNK else WORDS[i] for t, i in enumerate(one.token_ids) if i not in (0, 1, 2)]
        assert one.text == " ".join(said)


def test_what_cannot_be_replaced_is_refused_with_the_remedy(meetings: Path, dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle, threads=1) as model:
        with pytest.raises(ConfigError, match="replace_unknowns: this bundle was exported without alignment; export"):
            model.generate(["le 3"], replace_unknowns=True)
        result = CliRunner().invoke(main, ["generate", str(dates_bundle), "le 3", "--replace-unknowns"])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "export it again with --alignment LAYER" in result.stderr
    with tfexport.load(meetings, threads=1) as model:
        with pytest.raises(InputError, match="stream: replace_unknowns is true, but the alignment is known when"):
            model.stream(TEXTS[0], replace_unknowns=True)
        ((one,),) = model.generate_ids(
            [[UNK, ID["meets"], ID["Ben"], ID["on"], ID["Friday"], EOS]], replace_unknowns=True
        )
        assert UNK in one.token_ids
