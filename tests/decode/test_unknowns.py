"""Unknown tokens are replaced by the source's words, with a trained model and with random outputs."""

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
def test_names_outside_the_vocabulary_are_copied(meetings: Path, backend: str, options: dict[str, Any]) -> None:
    with tfexport.load(meetings, backend=backend, threads=1) as model:
        plain = model.generate(TEXTS, **options)
        replaced = model.generate(TEXTS, replace_unknowns=True, batch_size=2, **options)
        step = options.get("num_return_sequences", 1)
        assert [one.text for one in replaced[::step]] == SAID
        assert [one.token_ids for one in replaced] == [one.token_ids for one in plain]
        # <unk> is a special token, which is not decoded.
        assert [plain[0].text, plain[2 * step].text] == ["Friday : and Ben", "Tuesday : and"]
        assert model.generate(["Ada meets Ben on Friday"], replace_unknowns=True)[0].text == "Friday : Ada and Ben"


def test_the_command_line_and_stop_strings(meetings: Path) -> None:
    result = CliRunner().invoke(main, ["generate", str(meetings), *TEXTS, "--replace-unknowns"])
    assert (result.exit_code, result.stdout.splitlines()) == (0, SAID)
    with tfexport.load(meetings, threads=1) as model:
        (one,) = model.generate(TEXTS[:1], replace_unknowns=True, stop_strings="and Be")
        assert (one.text, one.finish_reason) == ("Friday : Zoë and Be", "stop")


def test_every_unknown_is_the_piece_with_the_largest_weight(meetings: Path) -> None:
    """Samples of high temperature, compared with NumPy on the alignment's weights."""
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
        best = alignment.weights[:, : len(words)].argmax(1)  # the end token is not copied
        expected = [words[best[t]] if i == UNK else WORDS[i] for t, i in enumerate(one.token_ids) if i not in (0, 1, 2)]
        assert one.text == " ".join(expected)


def test_calls_that_cannot_replace_are_refused(meetings: Path, dates_bundle: Path) -> None:
    with tfexport.load(dates_bundle, threads=1) as model:
        with pytest.raises(ConfigError, match="replace_unknowns: this bundle was exported without alignment; export"):
            model.generate(["le 3"], replace_unknowns=True)
        result = CliRunner().invoke(main, ["generate", str(dates_bundle), "le 3", "--replace-unknowns"])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "export it again with --alignment LAYER" in result.stderr
    with tfexport.load(meetings, threads=1) as model:
        with pytest.raises(InputError, match="stream: replace_unknowns is true, but the alignment is only known when"):
            model.stream(TEXTS[0], replace_unknowns=True)
        source = [UNK, *(ID[word] for word in "meets Ben on Friday".split()), EOS]
        ((one,),) = model.generate_ids([source], replace_unknowns=True)
        assert UNK in one.token_ids
