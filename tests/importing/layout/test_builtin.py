"""Built-in layouts: every recorded model is reproduced, every mistake is refused, Hugging Face decodes as it does.

The recorded outputs lie outside the repository; without them their tests skip.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.from_scratch.notebook_000 import Notebook000
from models.from_scratch.notebook_002 import Notebook002
from models.from_scratch.notebook_004 import Notebook004
from tests import tiny
from tfexport.errors import CheckpointError, ParityError
from tfexport.export.config import ExportConfig
from tfexport.importing._files import read_checkpoint
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names
from tfexport.importing.layout.layout import Layout, Value, builtin_layouts
from tfexport.importing.reference.certificate import certify
from tfexport.importing.reference.compare import Comparator, compare, tolerance
from tfexport.importing.reference.golden import Golden, read_golden, record
from tfexport.nn.directory import load_model

RECORDS = Path(__file__).resolve().parents[4] / "shared" / "goldens"
LAYOUTS = {
    "annotated_transformer": "annotated_transformer",
    "bentrevett": "bentrevett",
    "brandokoch": "brandokoch",
    "datacamp": "datacamp",
    "fairseq_post": "fairseq_post",
    "gordicaleksa": "gordicaleksa",
    "hf_bart": "hf_bart",
    "hf_marian": "hf_marian",
    "hf_t5": "hf_t5",
    "hf_t5_v1_1": "hf_t5_v1_1",
    "hkproj": "hkproj",
    "hkproj_2023_05": "hkproj",
    "hyunwoongko": "hyunwoongko",
    "lazyprogrammer": "lazyprogrammer",
    "opennmt_py": "opennmt_py",
    "torch_nn_transformer": "torch_nn_transformer",
}
NAMES = sorted(LAYOUTS)
recorded = pytest.mark.skipif(not RECORDS.is_dir(), reason="recorded outputs of other implementations are not here")


@functools.cache
def golden(name: str) -> Golden:
    return read_golden(RECORDS / f"{name}.golden.safetensors")


@functools.cache
def state(name: str) -> dict[str, Tensor]:
    tensors = read_checkpoint(RECORDS / f"{name}.safetensors").tensors
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def apply(name: str, layout: Layout | None = None, **settings: Value) -> Canonical:
    layout = layout or builtin_layouts()[LAYOUTS[name]]
    tokens = {f"tokens.{token}": 0 for token in ("pad", "start", "eos") if token not in layout.tokens}
    return apply_layout(layout, state(name), heads=golden(name).heads, settings={**tokens, **settings})


def limit(name: str) -> float:
    return tolerance(golden(name), builtin_layouts()[LAYOUTS[name]].baseline)


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_model_is_reproduced(name: str) -> None:
    found = compare(apply(name), golden(name))
    assert found.error <= limit(name)
    if name not in ("bentrevett", "opennmt_py", "fairseq_post", "hf_t5", "hf_t5_v1_1"):
        assert found.error < 1e-14


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_its_names_fit_no_other_layout(name: str) -> None:
    fitting = [layout.name for layout in builtin_layouts().values() if fits_names(layout, state(name))]
    # UMT5 has the names of T5 v1.1, and a bias in every layer, which applying asks for.
    more = ["hf_umt5"] if name == "hf_t5_v1_1" else []
    assert fitting == [LAYOUTS[name], *more]
    for other in more:
        with pytest.raises(CheckpointError):
            apply_layout(builtin_layouts()[other], state(name))


# Mistakes that an import could make: each has to be seen.

Mistake = Callable[[Canonical], Canonical | None]


def renamed(rename: Callable[[str], str]) -> Mistake:
    """Give tensors to other names, where those exist and have the same shape."""

    def make(canonical: Canonical) -> Canonical | None:
        tensors = dict(canonical.tensors)
        for name in canonical.tensors:
            other = rename(name)
            if other in tensors and tensors[name].shape == tensors[other].shape:
                tensors[name] = canonical.tensors[other]
        untied = replace(canonical.config, tie_embeddings=False, tie_output=False)
        changed = any(tensors[name] is not canonical.tensors[name] for name in tensors)
        return replace(canonical, config=untied, tensors=tensors) if changed else None

    return make


def swapped(one: str, other: str) -> Mistake:
    return renamed(lambda name: name.replace(one, "\0").replace(other, one).replace("\0", other))


def changed(keys: str, change: Callable[[Tensor], Tensor]) -> Mistake:
    def make(canonical: Canonical) -> Canonical | None:
        chosen = [name for name in canonical.tensors if name.endswith(keys)]
        tensors = {**canonical.tensors, **{name: change(canonical.tensors[name]) for name in chosen}}
        return replace(canonical, tensors=tensors) if chosen else None

    return make


def other_table(canonical: Canonical) -> Canonical | None:
    """Halves for interleaved and the other way round."""
    if "enc.pos" not in canonical.tensors:
        return None
    order = torch.cat((torch.arange(0, 32, 2), torch.arange(1, 32, 2)))
    tables = {name: canonical.tensors[name][:, order] for name in ("enc.pos", "dec.pos")}
    return replace(canonical, tensors={**canonical.tensors, **tables})


def by_head(rows: Tensor) -> Tensor:
    """Take rows as (d_k, heads)."""
    return rows.reshape(-1, 4, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def as_blocks(canonical: Canonical) -> Canonical:
    """Cut the fused projection of self-attention the other way: what is one block was by head."""
    tensors = dict(canonical.tensors)
    for name in canonical.tensors:
        if ".self.q." in name:
            three = [name, name.replace(".q.", ".k."), name.replace(".q.", ".v.")]
            fused = torch.cat([canonical.tensors[part] for part in three])
            parts = fused.reshape(4, 3, -1, *fused.shape[1:]).transpose(0, 1).reshape(3, -1, *fused.shape[1:])
            tensors |= dict(zip(three, parts, strict=True))
    return replace(canonical, tensors=tensors)


def layers_swapped(canonical: Canonical) -> Canonical:
    found = swapped("enc.layers.0.", "enc.layers.1.")(canonical)
    assert found is not None
    return found


MISTAKES: dict[str, Mistake] = {
    "encoder norms swapped": swapped("enc.layers.0.norm1", "enc.layers.0.norm2"),
    "decoder norms swapped": swapped("dec.layers.1.norm2", "dec.layers.1.norm3"),
    "keys for values": swapped(".self.k.", ".self.v."),
    "keys for values across": swapped(".cross.k.", ".cross.v."),
    "self for cross": swapped("dec.layers.0.self", "dec.layers.0.cross"),
    "encoder layers swapped": layers_swapped,
    "decoder layers swapped": swapped("dec.layers.0.", "dec.layers.1."),
    "queries by head": changed(".self.q.weight", by_head),
    "keys by head": changed(".cross.k.weight", by_head),
    "blocks for heads": as_blocks,
    "value bias zeroed": changed(".self.v.bias", torch.zeros_like),
    "output bias zeroed": changed("out.bias", torch.zeros_like),
    "feed-forward bias zeroed": changed("fc1.bias", torch.zeros_like),
    "gate for linear": swapped("ffn.fc1", "ffn.gate"),
    "position table": other_table,
    "positions off by one": changed(".pos", lambda table: table.roll(1, 0)),
}


def mistakes(name: str) -> Iterator[tuple[str, Canonical]]:
    canonical = apply(name)
    for kind, make in MISTAKES.items():
        if (wrong := make(canonical)) is not None:
            yield kind, wrong


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_every_mistake_is_refused(name: str) -> None:
    found = {kind: Comparator(wrong, golden(name)).compare(wrong.config) for kind, wrong in mistakes(name)}
    assert len(found) >= 10
    assert not [kind for kind, one in found.items() if one.passed(limit(name))]
    assert Comparator(apply(name), golden(name), mask_source=False).compare(apply(name).config).error > limit(name)


@recorded
@pytest.mark.parametrize("name", NAMES)
def test_the_certificate_lists_what_cannot_matter_and_nothing_else(name: str) -> None:
    canonical = apply(name)
    certificate = certify(canonical, golden(name), name, baseline=builtin_layouts()[LAYOUTS[name]].baseline)
    expected = set()
    if "enc.layers.0.self.k.bias" in canonical.tensors:
        expected = {f"{part}.k.bias: makes no difference" for part in KEYS}
    if canonical.config.relative_bias == "t5":
        expected = {"relative_max_distance: 128 is not told from 256"}
    if name == "opennmt_py":
        expected = {"norm_eps: 1e-06 is not told from 1e-07"}
    assert set(certificate.unverified) == expected
    assert certificate.proven


KEYS = ("enc.layers.*.self", "dec.layers.*.self", "dec.layers.*.cross")


@recorded
def test_a_golden_of_another_model_is_refused(tmp_path: Path) -> None:
    for other in ("bentrevett", "brandokoch"):
        with pytest.raises(ParityError, match=r"does not reproduce the golden|golden: .*is it a golden of this model"):
            import_checkpoint(
                RECORDS / "hkproj.safetensors",
                tmp_path / "out",
                ImportConfig(layout="hkproj"),
                golden=moved(other, tmp_path),
            )
    assert not (tmp_path / "out").exists()


def moved(name: str, folder: Path) -> Path:
    """Put a golden where its state dict is not beside it."""
    path = folder / f"{name}.safetensors"
    path.write_bytes((RECORDS / f"{name}.golden.safetensors").read_bytes())
    return path


@recorded
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_model_becomes_a_bundle_that_decodes_alike(name: str, tmp_path: Path) -> None:
    bundle_of(name, tmp_path)


@recorded
@pytest.mark.parametrize("name", ["hf_t5_v1_1"])
def test_one_becomes_a_bundle_that_decodes_alike(name: str, tmp_path: Path) -> None:
    bundle_of(name, tmp_path)


def bundle_of(name: str, folder: Path) -> None:
    """Export; its verification decodes greedily and with beams, and raises when one token differs."""
    from tfexport.export import export_bundle

    record = RECORDS / f"{name}.golden.safetensors"
    import_checkpoint(RECORDS / f"{name}.safetensors", folder / "model", golden=record)
    bundle = export_bundle(str(folder / "model"), folder / "bundle", ExportConfig(forms=("concat",)))
    assert bundle.manifest.parity is not None


# Notebooks


@pytest.mark.parametrize(
    ("model", "heads", "layout"),
    [(Notebook000, 4, "notebook-000"), (Notebook002, 4, "notebook-002"), (Notebook004, 6, "notebook-004")],
)
def test_a_repaired_notebook_is_imported(model: type[nn.Module], heads: int, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = model().eval()
    target = {"target_vocab": 31} if model is not Notebook002 else {}
    record(original, model.forward, tmp_path / "golden", source_vocab=31, heads=heads, **target)
    torch.save({"model_state_dict": original.state_dict(), "epoch": 9}, tmp_path / "a.pt")
    imported = import_checkpoint(tmp_path / "a.pt", tmp_path / "model", golden=tmp_path / "golden")
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

SIZES = {"vocab_size": 41, "d_model": 32}
SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(**SIZES, **SIDES, max_position_embeddings=24, forced_eos_token_id=None)
    return BartForConditionalGeneration(config)


@recorded
def test_a_relative_bias_tells_the_heads() -> None:
    found = apply_layout(builtin_layouts()["hf_t5"], state("hf_t5"))
    assert found.config.encoder.num_heads == golden("hf_t5").heads


def test_a_layout_asked_for_by_name_reads_config_json_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bart().save_pretrained(tmp_path / "hf")
    certificate = import_checkpoint(tmp_path / "hf", tmp_path / "model").certificate
    assert not certificate.proven
    assert certificate.unverified == ("everything: there was no golden to compare with",)
    import_checkpoint(tmp_path / "hf", tmp_path / "named", ImportConfig(layout=certificate.layout))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / file).read_bytes() == (tmp_path / "named" / file).read_bytes()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', expected bart"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh', expected one of"),
        ({"encoder_attention_heads": None}, "encoder_attention_heads is None, expected a whole number"),
        (
            {"pad_token_id": None, "eos_token_id": "x"},
            "pad_token_id is None, expected a whole number; give --set tokens.pad=ID; eos_token_id is 'x'",
        ),
    ],
)
def test_a_config_that_is_not_for_us(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    bart().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert problem in str(caught.value)


def test_dtypes_of_the_checkpoint_are_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Notebook004()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "a.safetensors")
    import_checkpoint(tmp_path / "a.safetensors", tmp_path / "out", ImportConfig(layout="notebook-004", heads=6))
    stored = read_checkpoint(tmp_path / "out" / "model.safetensors").tensors
    assert torch.equal(
        stored["enc.layers.0.self.q.weight"], weights["encoder.layers.0.MHA.Q_linear_projection_layer.weight"]
    )
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
