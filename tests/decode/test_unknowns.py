"""Unknown tokens become the source's own words: as a rule of arithmetic on any model, and by a model that learnt it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from click.testing import CliRunner
from tokenizers import models, pre_tokenizers, processors
from torch.nn import functional as F

import tfexport
from tests import tiny
from tfexport import ConfigError, InputError
from tfexport.cli import main
from tfexport.export import export_bundle
from tfexport.files.names import TOKENIZER
from tfexport.graph.config import ExportConfig
from tfexport.models.alignment import align
from tfexport.models.directory import save_model
from tfexport.models.transformer import Transformer
from tfexport.spec import AlignmentHeads, Form, TokenIds

Once = Callable[[str, Callable[[Path], object]], Path]
PAD, START, EOS, UNK = range(4)
NAMES = ("Ada", "Ben", "Cleo", "Dov", "Eve", "Finn")
DAYS = ("Monday", "Tuesday", "Friday")
WORDS = ("<pad>", "<s>", "</s>", "<unk>", *NAMES, *DAYS, "meets", "on", ":", "and")
ID = {word: number for number, word in enumerate(WORDS)}
HEAD = AlignmentHeads(layer=0, heads=(0,))
TEXTS = ["Zoë meets Ben on Friday", "Ada meets Xi on Monday", "Ólafur meets Nkechi on Tuesday"]
SAID = ["Friday : Zoë and Ben", "Monday : Ada and Xi", "Tuesday : Ólafur and Nkechi"]


def tokenizer() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    inner.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    return inner


def trained() -> Transformer:
    """Learn to say who meets whom, with names that are often unknown."""
    torch.manual_seed(0)
    config = tiny.config(
        encoder={"layers": 1},
        decoder={"layers": 1},
        source_vocab=len(WORDS),
        target_vocab=len(WORDS),
        tokens=TokenIds(pad=PAD, start=START, eos=EOS, unk=UNK),
        embedding_scale=32**0.5,
    )
    model = Transformer(config).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(200):
        names = torch.randint(ID["Ada"], ID["Finn"] + 1, (2, 64))
        one, two = torch.where(torch.rand(2, 64) < 0.4, UNK, names)
        day = torch.randint(ID["Monday"], ID["Friday"] + 1, (64,))
        word = {name: torch.full((64,), ID[name]) for name in ("meets", "on", "</s>", ":", "and", "<s>")}
        source = torch.stack((one, word["meets"], two, word["on"], day, word["</s>"]), 1)
        target = torch.stack((word["<s>"], day, word[":"], one, word["and"], two, word["</s>"]), 1)
        mask, read = torch.ones_like(source, dtype=torch.bool), target[:, :-1]
        loss = F.cross_entropy(model(source, mask, read).flatten(0, 1), target[:, 1:].flatten())
        # Guided alignment: one head is told where day and names stand.
        weights = align(model, HEAD, source, mask, read)
        loss = loss - weights[:, (0, 2, 4), (4, 0, 2)].log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.eval()


def made(path: Path, model: Transformer, alignment: AlignmentHeads | None, form: Form = "contrib") -> None:
    folder = path.with_name(f"{path.name}-model")
    save_model(model, folder)
    tokenizer().save(str(folder / TOKENIZER))
    export_bundle(str(folder), path, ExportConfig(forms=(form,), alignment=alignment), verify=False)


@pytest.fixture(scope="session")
def meetings(once: Once) -> Path:
    return once("meetings", lambda path: made(path, trained(), HEAD))


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


def test_every_unknown_is_the_piece_with_the_largest_weight(tmp_path: Path) -> None:
    """A random model that says little else, beside NumPy on the alignment's own weights."""
    config = tiny.config(
        source_vocab=len(WORDS), target_vocab=len(WORDS), tokens=TokenIds(pad=PAD, start=START, eos=EOS, unk=UNK)
    )
    random = tiny.model(config, dtype=torch.float32)
    with torch.no_grad():
        random.out.bias[UNK] += 4.5
    made(tmp_path / "random", random, AlignmentHeads(layer=-1), "concat")
    texts = ["Ada on meets", "Zoë : Ben and Xi", "and", "Friday Kofi Monday Ada Finn"]
    with tfexport.load(tmp_path / "random", threads=1) as model:
        results = model.generate(texts, replace_unknowns=True, do_sample=True, max_new_tokens=9)
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
