"""Public models: their layouts read them without a reference, and a reference finds them without their layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from models.from_scratch.joeynmt import JoeyNmt
from models.from_scratch.leviswind import Leviswind
from models.from_scratch.parts import HEADS, SOURCE, TARGET
from models.from_scratch.tunz import Tunz
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError
from tfexport.generation import DecodeConfig
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect.search import Budget, detect
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import fits_names
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.importing.reference.outputs import ReferenceOutputs, record_reference
from tfexport.nn.directory import load_model
from tfexport.nn.switches import Value
from tfexport.runtime.eager import EagerSession

_CLASSES = """
aladdinpersson.AladdinPersson ajhalthor.Ajhalthor d2l.D2l devjwsong.Devjwsong dreamgonfly.Dreamgonfly
feather_ai.FeatherAi graykode.Graykode jadore801120.Jadore801120 jayparks.JayParks joeynmt.JoeyNmt labml.Labml
samlynnevans.SamLynnEvans sgrvinod.Sgrvinod sooftware.Sooftware tunz.Tunz wmathor.Wmathor x_transformers.XTransformers
""".split()
MODELS: dict[str, Callable[[], nn.Module]] = {
    module: getattr(import_module(f"models.from_scratch.{module}"), name)
    for module, name in (path.split(".") for path in _CLASSES)
}
# Made with an option of its code.
SETTINGS = {
    "joeynmt": tuple(
        f"{side}.residual_scale={alpha!r}" for side, alpha in zip(("enc", "dec"), JoeyNmt.alphas, strict=True)
    )
}
# One vocabulary for both sides.
JOINT = ("jadore801120", "sgrvinod", "tunz")
REFUSED: dict[str, Callable[[], nn.Module]] = {"leviswind": Leviswind}
# Found without a layout; the positions of the one left out are a list in its code, which no tensor shows.
FOUND = sorted(MODELS.keys() - {"graykode"})
QUICK = ("d2l", "feather_ai", "wmathor")


@dataclass(frozen=True)
class Made:
    """A rebuilt model of random weights, its file and the reference of it."""

    name: str
    model: nn.Module
    file: Path
    reference: Path
    recorded: ReferenceOutputs


@functools.cache
def made(name: str, folder: Path) -> Made:
    torch.manual_seed(0)
    model = (MODELS | REFUSED)[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    lengths = {part: getattr(model, part) for part in ("source_len", "target_len") if hasattr(model, part)}
    recorded = record_reference(
        model,
        lambda model, *inputs: model(*inputs),
        folder / f"{name}.reference",
        source_vocab=TARGET if name in JOINT else SOURCE,
        target_vocab=TARGET,
        heads=HEADS,
        **lengths,
    )
    torch.save({"model_state_dict": model.state_dict()}, folder / f"{name}.pt")
    return Made(name, model, folder / f"{name}.pt", folder / f"{name}.reference", recorded)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    folder = tmp_path_factory.mktemp("public")
    return lambda name: made(name, folder)


def worst(one: Made, model: Path) -> float:
    """Compare log-probabilities of valid positions, of the file's own weights, in float32."""
    reference = one.recorded
    assert reference.target_ids is not None
    assert reference.target_mask is not None
    batch = reference.source_ids, reference.source_mask, reference.target_ids
    with torch.no_grad():
        theirs, ours = (each(*batch).log_softmax(-1) for each in (one.model, load_model(model)))
    return float((theirs - ours)[reference.target_mask].abs().max())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_layout_imports_it_without_a_reference(name: str, public: Callable[[str], Made], tmp_path: Path) -> None:
    one, layout = public(name), builtin_layouts()[name]
    assert [other.name for other in builtin_layouts().values() if fits_names(other, one.model.state_dict())] == [name]
    missing = [token for token in ("pad", "start", "eos") if token not in layout.tokens]
    # The reference has the padding as 0.
    settings = ("tokens.pad=0", *(f"tokens.{token}=0" for token in missing if token != "pad"))
    config = ImportConfig(layout=name, heads=HEADS, settings=(*settings, *SETTINGS.get(name, ())))
    imported = import_checkpoint(one.file, tmp_path / "model", config)
    assert not imported.certificate.proven
    assert worst(one, tmp_path / "model") < 1e-5


def found(one: Made, folder: Path) -> None:
    imported = import_checkpoint(one.file, folder / "model", ImportConfig(builtin=False), reference=one.reference)
    assert imported.certificate.proven
    assert imported.certificate.error is not None
    # A table that the reference does not bring is computed in float32.
    assert imported.certificate.error < (1e-7 if one.name in ("ajhalthor", "tunz") else 1e-12)
    assert imported.layout.name == "found"
    assert imported.certificate.tensors.keys() == one.model.state_dict().keys()
    assert worst(one, folder / "model") < 1e-5


@pytest.mark.parametrize("name", QUICK)
def test_the_search_finds_it_without_a_layout(name: str, public: Callable[[str], Made], tmp_path: Path) -> None:
    found(public(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_search_finds_every_one_without_a_layout(name: str, public: Callable[[str], Made], tmp_path: Path) -> None:
    found(public(name), tmp_path)


def test_attention_without_an_output_projection_is_refused(tmp_path: Path) -> None:
    one = made("leviswind", tmp_path)
    with pytest.raises(CheckpointError, match=r"have no attention .*or export it as your own module"):
        import_checkpoint(one.file, tmp_path / "model", reference=one.reference)


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("tunz", {"norm_eps": 1e-6, "activation": "relu", "embedding_scale": 4.0}, "dec.embed.weight |> zero_row 0"),
        (
            "x_transformers",
            {"norm_eps": 1e-5, "activation": "gelu"},
            "decoder.net.pos_emb.emb.weight -> dec.pos |> mul d_model ** -0.5",
        ),
    ],
)
def test_the_reference_decides_settings_that_no_key_shows(
    name: str, given: dict[str, Value], line: str, public: Callable[[str], Made]
) -> None:
    """A start from zeros, gains stored as gain - 1 and tables that are scaled down; the usual switches are given."""
    reference = public(name).recorded
    state = {key: tensor.double() for key, tensor in reference.state.items()}
    settings = {"norm": "layernorm", "norm_place": "pre", "logit_scale": 1.0, **given}
    search = detect(state, reference, [], settings=settings, budget=Budget(2_000)).search
    assert search is not None
    assert search.accepted
    assert search.best is not None
    assert line in (*search.best.layout.map, *search.best.layout.post)


def test_a_decoder_that_starts_from_zeros_equals_the_original(tmp_path: Path) -> None:
    """The `forward` of Tunz puts zeros in the place of the first id."""
    torch.manual_seed(0)
    model, pad, eos = Tunz().double().eval(), 1, 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A shared table of large rows would repeat each token.
            parameter.mul_(0.05 if "embedding" in name else 4.0)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "model", ImportConfig(layout="tunz", heads=HEADS))
    imported = load_model(tmp_path / "model")
    assert imported.config.tokens.start == pad
    assert not imported.config.tie_output, "the output keeps its row of the padding"

    def greedy(source: list[int]) -> list[int]:
        ids = torch.tensor([source])
        tokens: list[int] = []
        while len(tokens) < 10 and eos not in tokens:
            target = torch.tensor([[pad, *tokens]])
            with torch.no_grad():
                tokens.append(int(model(ids, torch.ones_like(ids, dtype=torch.bool), target)[0, -1].argmax()))
        return tokens

    sources = [torch.randint(3, TARGET, (n,)).tolist() for n in range(1, 9)]
    expected = [greedy(source) for source in sources]
    ours = decode(EagerSession(imported), sources, DecodeConfig(max_new_tokens=10))
    assert [list(best.token_ids) for (best,) in ours] == expected
    assert len({tuple(text) for text in expected}) > 4, "texts differ"
