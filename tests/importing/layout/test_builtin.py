"""Built-in layouts reproduce recorded models, repaired notebooks and Hugging Face directories.

The recorded outputs are outside of the repository; without them their tests skip.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.from_scratch.notebook_000 import Notebook000
from models.from_scratch.notebook_002 import Notebook002
from models.from_scratch.notebook_004 import Notebook004
from tests import tiny
from tests.importing.huggingface import published
from tfexport.errors import CheckpointError
from tfexport.importing._files import read_checkpoint
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names
from tfexport.importing.layout.layout import builtin_layouts
from tfexport.importing.reference.certificate import certify
from tfexport.importing.reference.compare import compare, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference, record_reference
from tfexport.nn.directory import load_model

RECORDS = Path(__file__).resolve().parents[4] / "shared" / "goldens"
NAMES = sorted(path.name.split(".")[0] for path in RECORDS.glob("*.golden.safetensors"))
LAYOUTS = {name: name.removesuffix("_2023_05") for name in NAMES}
# One of each kind, whose certificates differ; the others are slow.
_QUICK = ("bentrevett", "hf_bart", "hf_t5_v1_1", "opennmt_py")
CERTIFIED = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in NAMES]
recorded = pytest.mark.skipif(not RECORDS.is_dir(), reason="recorded outputs of other implementations are not here")


@functools.cache
def reference(name: str) -> ReferenceOutputs:
    return read_reference(RECORDS / f"{name}.golden.safetensors")


@functools.cache
def state(name: str) -> dict[str, Tensor]:
    tensors = read_checkpoint(RECORDS / f"{name}.safetensors").tensors
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def apply(name: str) -> Canonical:
    layout = builtin_layouts()[LAYOUTS[name]]
    tokens = {f"tokens.{token}": 0 for token in ("pad", "start", "eos") if token not in layout.tokens}
    return apply_layout(layout, state(name), heads=reference(name).heads, settings=tokens)


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_model_is_reproduced(name: str) -> None:
    found = compare(apply(name), reference(name))
    assert found.error <= tolerance(reference(name), builtin_layouts()[LAYOUTS[name]].baseline)
    if name not in ("bentrevett", "opennmt_py", "fairseq_post", "hf_t5", "hf_t5_v1_1"):
        assert found.error < 1e-14


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_the_names_fit_no_other_layout(name: str) -> None:
    fitting = [layout.name for layout in builtin_layouts().values() if fits_names(layout, state(name))]
    # UMT5 has the names of T5 v1.1, and a bias in every layer, which applying asks for.
    more = ["hf_umt5"] if name == "hf_t5_v1_1" else []
    assert fitting == [LAYOUTS[name], *more]
    for other in more:
        with pytest.raises(CheckpointError):
            apply_layout(builtin_layouts()[other], state(name))


KEYS = ("enc.layers.*.self", "dec.layers.*.self", "dec.layers.*.cross")


@recorded
@pytest.mark.parametrize("name", CERTIFIED)
def test_the_certificate_lists_only_settings_without_effect(name: str) -> None:
    canonical = apply(name)
    certificate = certify(canonical, reference(name), name, baseline=builtin_layouts()[LAYOUTS[name]].baseline)
    expected = set()
    if "enc.layers.0.self.k.bias" in canonical.tensors:
        expected = {f"{part}.k.bias: makes no difference" for part in KEYS}
    if canonical.config.relative_bias == "t5":
        expected = {"relative_max_distance: 128 and 256 give the same outputs"}
    if name == "opennmt_py":
        expected = {"norm_eps: 1e-06 and 1e-07 give the same outputs"}
    # These files are older than rows up to the length limits.
    assert {line for line in certificate.unverified if " length: compared up to " not in line} == expected
    assert certificate.proven


# Notebooks


@pytest.mark.parametrize(
    ("model", "heads", "layout"),
    [(Notebook000, 4, "notebook-000"), (Notebook002, 4, "notebook-002"), (Notebook004, 6, "notebook-004")],
)
def test_a_repaired_notebook_is_imported(model: type[nn.Module], heads: int, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = model().eval()
    target = {"target_vocab": 31} if model is not Notebook002 else {}
    record_reference(original, model.forward, tmp_path / "reference", source_vocab=31, heads=heads, **target)
    torch.save({"model_state_dict": original.state_dict(), "epoch": 9}, tmp_path / "a.pt")
    imported = import_checkpoint(tmp_path / "a.pt", tmp_path / "model", reference=tmp_path / "reference")
    assert imported.layout.name == layout
    assert imported.certificate.proven
    found = load_model(tmp_path / "model").double()
    batch = tiny.batch()
    with torch.no_grad():
        if model is Notebook002:
            expected = original.double()(batch.source_ids, batch.source_mask)
            difference = found.hidden_states(batch.source_ids, batch.source_mask) - expected
            difference = difference[batch.source_mask]
        else:
            difference = found(*batch) - original.double()(*batch)
    # The fold of 000 is rounded to float32 when it is stored.
    assert difference.abs().max() < 1e-5


# Hugging Face directories


@recorded
def test_the_relative_bias_gives_the_number_of_heads() -> None:
    found = apply_layout(builtin_layouts()["hf_t5"], state("hf_t5"))
    assert found.config.encoder.num_heads == reference("hf_t5").heads


def test_a_layout_given_by_name_reads_config_json_too(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "bart-large-cnn")
    assert import_checkpoint(tmp_path / "hf", tmp_path / "model").certificate.proven
    by_name = ImportConfig(layout="hf_bart", compare=False)
    certificate = import_checkpoint(tmp_path / "hf", tmp_path / "named", by_name).certificate
    assert not certificate.proven
    assert certificate.unverified == ("everything: there are no reference outputs",)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / file).read_bytes() == (tmp_path / "named" / file).read_bytes()


def test_every_problem_of_a_config_is_named_at_once(tmp_path: Path) -> None:
    change = {"activation_function": "tanh", "pad_token_id": None, "eos_token_id": "x"}
    config = json.loads((published.write(tmp_path / "hf", "bart-large-cnn") / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    for problem in (
        "activation_function is 'tanh', expected one of",
        "pad_token_id is None, expected a whole number; give --set tokens.pad=ID",
        "eos_token_id is 'x'",
    ):
        assert problem in str(caught.value)
