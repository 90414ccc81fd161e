"""Reference outputs are what the original computes; those that cannot prove anything are refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.from_scratch import parts
from models.from_scratch.mixed import Mixed
from models.from_scratch.numbered_blocks import NumberedBlocks
from models.from_scratch.pieces import HEADS, SOURCE, TARGET, D
from models.from_scratch.tunz import Tunz
from tests import tiny
from tests.importing.reference.test_certificate import made
from tests.nn.foreign import canonical_from_torch
from tfexport.contract import TokenIds
from tfexport.errors import CheckpointError, ParityError
from tfexport.importing.layout.apply import Canonical
from tfexport.importing.reference.compare import compare, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference, record_reference
from tfexport.importing.reference.weights import randomize, tensor_sums
from tfexport.nn.positions import sinusoid_table


def call(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs)


def recorded(model: nn.Module, path: Path, **options: Any) -> ReferenceOutputs:
    options = {"source_vocab": SOURCE, "target_vocab": TARGET, "heads": HEADS, **options}
    return record_reference(model, options.pop("forward", call), path, **options)


@pytest.fixture(scope="module")
def reference_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "one.safetensors"
    torch.manual_seed(0)
    recorded(NumberedBlocks(), path)
    return path


class Torch(nn.Module):
    """nn.Transformer in the usual shell."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Transformer(D, HEADS, 2, 2, 40, batch_first=True, **options)
        self.body.encoder.use_nested_tensor = False  # a prototype that warns
        self.source, self.target, self.out = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D), nn.Linear(D, TARGET)
        self.register_buffer("table", sinusoid_table(16, D))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        x, y = (
            e(i) * math.sqrt(D) + self.table[: i.shape[1]] for e, i in ((self.source, source), (self.target, target))
        )
        masks = {"src_key_padding_mask": ~keep, "memory_key_padding_mask": ~keep, "tgt_mask": later}
        return self.out(self.body(x, y, **masks))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_a_recorded_model_equals_its_canonical_model(options: dict[str, Any], tmp_path: Path) -> None:
    """The layout of PyTorch's own transformer reproduces what was recorded, with random and with own weights."""
    torch.manual_seed(0)
    model = Torch(**options)
    before = copy.deepcopy(model.state_dict())
    recorded(model, tmp_path / "g", encode=encoded)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    reference = read_reference(tmp_path / "g")
    assert reference.baseline < 1e-13
    assert reference.with_real_weights() is not None
    for state, stage in ((reference.state, reference), (before, reference.with_real_weights())):
        model.load_state_dict(state)
        twin = canonical_from_torch(
            model.body, model.source, model.target, model.out, model.table, TokenIds(pad=0, start=1, eos=2)
        )
        found = compare(Canonical(twin.config, dict(twin.state_dict()), ()), stage)
        assert found.error < 1e-12
        assert found.encoder_error is not None
        assert found.encoder_error < 1e-12


def encoded(model: Any, ids: Tensor, keep: Tensor) -> Tensor:
    x = model.source(ids) * math.sqrt(D) + model.table[: ids.shape[1]]
    return model.body.encoder(x, src_key_padding_mask=~keep)


def test_the_batch_shows_masks_and_positions(reference_file: Path) -> None:
    reference = read_reference(reference_file)
    assert reference.target_ids is not None
    assert reference.target_mask is not None
    assert reference.source_mask.sum(1).tolist() == [9, 5, 1]
    assert reference.target_mask.sum(1).tolist() == [7, 4, 1]
    assert bool((reference.source_ids[~reference.source_mask] == 0).all())
    assert bool((reference.source_ids[reference.source_mask] != 0).all())


def test_every_parameter_is_random_and_every_table_stays(reference_file: Path) -> None:
    torch.manual_seed(0)
    state, original = read_reference(reference_file).state, NumberedBlocks().state_dict()
    assert state.keys() == original.keys()
    for name, value in state.items():
        assert torch.equal(value, original[name]) is (name == "positions"), name
        assert name == "positions" or float(value.std()) > 0.05, name


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model = Mixed()
    reference = recorded(
        model, tmp_path / "g", source_vocab=TARGET, forward=lambda m, *inputs: m(*inputs).log_softmax(-1)
    )
    model.load_state_dict(reference.state)


def test_arithmetic_in_float32_is_measured(tmp_path: Path) -> None:
    class Rounds(Torch):
        def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
            return super().forward(source, keep, target).float().double() * 2

    baseline = recorded(Rounds(), tmp_path / "g").baseline
    assert 1e-9 < baseline < 1e-6
    assert tolerance(read_reference(tmp_path / "g")) == pytest.approx(20 * baseline)


PARTS = {"source_vocab": parts.TARGET, "target_vocab": parts.TARGET}


def test_a_first_id_that_changes_nothing_is_recorded_as_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for model, starts in ((Tunz(), True), (NumberedBlocks(), False)):
        reference = recorded(model, tmp_path / str(starts), **(PARTS if starts else {}), pad_target=1)
        assert reference.target_ids is not None
        assert reference.target_mask is not None
        assert (reference.target_ids[:, 0] == 1).tolist() == [starts] * 3
        assert 1 not in reference.target_ids[:, 1:][reference.target_mask[:, 1:]].tolist()


def test_tables_outside_of_the_state_dict_are_recorded(tmp_path: Path) -> None:
    class Hidden(Torch):
        def __init__(self) -> None:
            super().__init__()
            del self.table
            self.table = sinusoid_table(16, D)

    reference = recorded(Hidden(), tmp_path / "g")
    assert "table" not in reference.state
    assert torch.equal(read_reference(tmp_path / "g").attributes["table"], sinusoid_table(16, D))


def last_swapped(model: nn.Module, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    return model(source, keep, target.flip(1))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (last_swapped, "causal mask"),
        (lambda m, *i: nn.functional.dropout(m(*i), 0.5), "two runs differ"),
        (lambda m, *i: m(*i).flatten(0, 1), r"forward: returns \[21, 31\], expected \[3, 7, 31\]"),
        (lambda m, *i: m(*i).transpose(0, 1), r"forward: returns \[7, 3, 31\]"),
        (lambda m, *i: None, "forward: returns NoneType"),
        (lambda m, *i: m(*i) * math.nan, "NaN"),
    ],
)
def test_a_model_with_constant_outputs_is_refused(forward: Callable[..., Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        recorded(Torch(), tmp_path / "g", forward=forward)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward", lambda m, source, target: m(source, source > 0, target)),
        ("forward", torch.zeros(3, 7, TARGET)),
        ("encode", lambda m, source: source),
        ("source_vocab", "31"),
        ("heads", 0),
        ("pad_source", SOURCE),
        ("start", "<s>"),
        ("end", TARGET),
        ("texts", ["a text"]),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        recorded(Torch(), tmp_path / "g", **{name: value})
    assert caught.value.subject == f"reference: {name}" or caught.value.problems[0].startswith(f"{name} is ")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_with_force(reference_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "g"
    path.write_bytes(before := reference_file.read_bytes())
    with pytest.raises(CheckpointError, match="exists; use force=True"):
        recorded(NumberedBlocks(), path)
    assert path.read_bytes() == before
    replaced = recorded(NumberedBlocks(), path, force=True)
    assert read_reference(path).state.keys() == replaced.state.keys()
    assert path.read_bytes() != before


def test_a_model_that_cannot_be_copied_is_one_line(tmp_path: Path) -> None:
    model = Torch()
    model.hook = model.out.weight * 1  # as some notebooks keep a result of the graph
    with pytest.raises(CheckpointError, match="cannot be copied"):
        recorded(model, tmp_path / "g")


CORRUPTIONS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "left padded": (lambda t: t.update(source_mask=t["source_mask"].flip(1)), "pad on the right"),
    "nan": (lambda t: t["logits"].fill_(math.nan), "NaN or infinity"),
    "float32": (lambda t: t.update(logits=t["logits"].float()), "torch.float64"),
    "other rows": (lambda t: t.update(logits=t["logits"][:2]), r"\[2, 7, 31\]"),
    "no logits": (lambda t: t.pop("logits"), "logits are missing"),
    "no source": (lambda t: t.pop("source_ids"), "missing tensor source_ids"),
    "unknown": (lambda t: t.update(labels=torch.zeros(3)), "unknown tensor 'labels'"),
    "int mask": (lambda t: t.update(target_mask=t["target_mask"].long()), "bool"),
    "negative ids": (lambda t: t.update(source_ids=-t["source_ids"]), "negative ids"),
    "empty": (lambda t: t.update(source_ids=t["source_ids"][:0], source_mask=t["source_mask"][:0]), "empty"),
}


def test_a_reference_with_the_former_names_of_masks_is_read(tmp_path: Path) -> None:
    """As they were recorded before the masks had their names of everywhere else; both at once are refused."""
    recorded(NumberedBlocks(), tmp_path / "g")
    reference, tensors = read_reference(tmp_path / "g"), load_file(tmp_path / "g")
    with safe_open(tmp_path / "g", "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "sha256"}
    former = {name: tensors[name.replace("_keep", "_mask")].clone() for name in ("source_keep", "target_keep")}
    others = {name: tensor for name, tensor in tensors.items() if name not in ("source_mask", "target_mask")}
    save_file(others | former, tmp_path / "former", metadata)
    again = read_reference(tmp_path / "former")
    assert torch.equal(again.source_mask, reference.source_mask)
    assert again.target_mask is not None
    save_file(tensors | former, tmp_path / "both", metadata)
    with pytest.raises(CheckpointError, match="tensor source_mask is there twice"):
        read_reference(tmp_path / "both")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_reference_is_refused(name: str, reference_file: Path, tmp_path: Path) -> None:
    damage, message = CORRUPTIONS[name]
    tensors = load_file(reference_file)
    damage(tensors)
    save_file(tensors, tmp_path / "g", metadata={"heads": "4"})
    with pytest.raises(CheckpointError, match=message) as caught:
        read_reference(tmp_path / "g")
    assert str(tmp_path / "g") in str(caught.value)


def test_a_reference_that_was_changed_anywhere_is_refused(reference_file: Path, tmp_path: Path) -> None:
    """Also where no number would show it: in rows of a table that the recorded batch is too short for."""
    whole = reference_file.read_bytes()
    reference = read_reference(reference_file)
    tensors = {"state": reference.state["positions"], "logits": reference.logits, "real": reference.real["logits"]}
    path = tmp_path / "g"
    for name, tensor in tensors.items():
        assert tensor is not None
        raw = tensor.numpy().tobytes()
        place = whole.index(raw) + len(raw) - tensor.itemsize
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="has changed since it was recorded"):
            read_reference(path)
        assert name
    path.write_bytes(whole.replace(b'"heads":"4"', b'"heads":"2"'))
    with pytest.raises(CheckpointError, match="has changed since"):
        read_reference(path)


def test_a_reference_names_the_weights_of_the_model_itself(reference_file: Path) -> None:
    """And not of the random copy; whatever type holds them."""
    torch.manual_seed(0)
    state = NumberedBlocks().state_dict()
    reference = read_reference(reference_file)
    assert reference.weights == tensor_sums(state) != tensor_sums(reference.state)
    assert tensor_sums({name: tensor.double() for name, tensor in state.items()}) == reference.weights
    turned = {name: tensor.T.contiguous() for name, tensor in state.items() if tensor.dim() == 2}
    assert all(reference.weights[name] != found for name, found in tensor_sums(turned).items())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"heads": "four"}, "heads is 'four'"),
        ({"heads": "0"}, "heads is 0"),
        ({"baseline": "nan"}, "baseline is nan"),
        ({"baseline": "0.5"}, "baseline is 0.5"),
        ({"compute_dtype": "float32"}, "expected float64"),
    ],
)
def test_wrong_metadata_is_refused(
    metadata: dict[str, str], message: str, reference_file: Path, tmp_path: Path
) -> None:
    save_file(load_file(reference_file), tmp_path / "g", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        read_reference(tmp_path / "g")


def test_a_file_that_is_no_reference_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(b"PK\x03\x04" * 99)
    for path, message in (
        (tmp_path / "g", "not a safetensors file"),
        (tmp_path / "none", "is missing"),
        (tmp_path, "not a plain file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_reference(path)


def test_nan_at_padded_positions_is_accepted(reference_file: Path, tmp_path: Path) -> None:
    tensors = load_file(reference_file)
    tensors["logits"][~tensors["target_mask"]] = math.nan
    save_file(tensors, tmp_path / "g")
    assert read_reference(tmp_path / "g").logits is not None


def test_equal_biases_are_random_and_constants_stay() -> None:
    module = nn.Module()
    module.register_buffer("logits_bias", torch.zeros(1, 5))
    module.register_buffer("scale", torch.tensor([4.0]))
    module.register_buffer("mask", torch.ones(4, 4).tril())
    module.register_buffer("steps", torch.zeros(3, dtype=torch.long))
    randomize(module, torch.Generator().manual_seed(0))
    assert float(module.logits_bias.abs().min()) > 0
    assert module.scale.tolist() == [4.0]
    assert torch.equal(module.mask, torch.ones(4, 4).tril())
    assert module.steps.tolist() == [0, 0, 0]


def test_the_worst_place_is_named() -> None:
    canonical, reference = made(tiny.config())
    assert reference.logits is not None
    reference.logits[1, 3, 5] += 1.0
    found = compare(canonical, reference)
    assert (found.row, found.position) == (1, 3)
    assert found.stage(1e-9) == "encoder or decoder"
    assert not found.passed(1e-3)


def test_a_reference_of_another_model_is_refused() -> None:
    canonical, reference = made(tiny.config())
    larger = ReferenceOutputs(
        source_ids=reference.source_ids + 40,
        source_mask=reference.source_mask,
        target_ids=reference.target_ids,
        target_mask=reference.target_mask,
        logits=torch.zeros(3, 7, 99, dtype=torch.float64),
    )
    with pytest.raises(
        ParityError, match=r"source id \d+ is not below the vocabulary 31; logits have width 99"
    ) as caught:
        compare(canonical, larger)
    assert "were they recorded from this model?" in str(caught.value)
