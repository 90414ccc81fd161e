"""The certificate: whatever is wrong in an import shows in the reference, or is listed as unverified."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.command import ran, run
from tfexport._io.names import CERTIFICATE
from tfexport.describe import inspect_path
from tfexport.importing.layout.apply import Canonical, LineUse
from tfexport.importing.layout.sizes import configured as with_values
from tfexport.importing.layout.sizes import options
from tfexport.importing.reference.certificate import Certificate, certify
from tfexport.importing.reference.compare import Comparator
from tfexport.importing.reference.outputs import ReferenceOutputs
from tfexport.nn.directory import save_model
from tfexport.nn.switches import SWITCHES
from tfexport.nn.transformer import Transformer

LENGTHS = {"source length", "target length"}  # the short batch does not reach the limit of 24
K_BIASES = {"enc.layers.*.self.k.bias", "dec.layers.*.self.k.bias", "dec.layers.*.cross.k.bias"}


def made(config: Any, *, padded: bool = True) -> tuple[Canonical, ReferenceOutputs]:
    """A canonical model and the reference of itself; every tensor has its own line."""
    model = tiny.model(config)
    source_ids, source_mask, target_ids = tiny.batch()
    if not padded:
        source_mask = torch.ones_like(source_mask)
    reference: dict[str, Any] = {"source_ids": source_ids, "source_mask": source_mask}
    with torch.no_grad():
        if config.decoder is None:
            reference |= {"hidden_states": model.hidden_states(source_ids, source_mask)}
        else:
            keep = torch.ones_like(target_ids, dtype=torch.bool)
            logits = model(source_ids, source_mask, target_ids)
            reference |= {"target_ids": target_ids, "target_mask": keep, "logits": logits}
    tensors = dict(model.state_dict())
    lines = tuple(LineUse(f"{name} -> {name}", (name,), (name,)) for name in tensors)
    return Canonical(config, tensors, lines), ReferenceOutputs(**reference)


def about(certificate: Certificate) -> set[str]:
    return {entry.partition(":")[0] for entry in certificate.unverified}


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_only_settings_without_effect_are_unverified(name: str) -> None:
    canonical, reference = made(tiny.VARIANTS[name])
    certificate = certify(canonical, reference, name)
    assert certificate.proven
    assert certificate.error is not None
    assert certificate.error < 1e-14
    # Adding the same number to all scores of a row changes no softmax. Behind a norm, it is the norm that adds it.
    config = canonical.config
    added = {name if config.qk_norm == "none" else name.replace("k.bias", "k_norm.bias") for name in K_BIASES}
    assert (
        about(certificate)
        == (
            added & {re.sub(r"\d+", "*", name) for name in canonical.tensors}
            or {"relative_max_distance"} & about(certificate)
        )
        | LENGTHS
    )
    assert len(certificate.lines) == len(canonical.tensors)
    assert {"norm", "activation", "norm_eps", "source mask", "attention_scale"} <= set(certificate.switches)
    # Whatever is not as it mostly is was dropped.
    plain = {name: (None, "none", SWITCHES[name.rpartition(".")[2]].default) for name in config.switches()}
    unusual = {name for name, value in config.switches().items() if value not in plain[name]}
    # Parallel blocks cannot be post-norm, and names of tensors show the mixer.
    assert unusual - ({"dec.norm_place"} if name == "modern" else {"dec.mixer"}) <= set(certificate.switches)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("post", name) for name in options(tiny.VARIANTS["post"])),
        *(("modern", name) for name in sorted({*options(tiny.VARIANTS["modern"])} - {*options(tiny.VARIANTS["post"])})),
    ],
)
def test_changing_a_switch_equals_building_another_model(variant: str, name: str) -> None:
    """A search sets the switches of one built model: one that it forgot would seem to make no difference."""
    canonical, reference = made(tiny.VARIANTS[variant])
    built = Comparator(canonical, reference)
    seen = set()
    for value in options(canonical.config)[name]:
        changed = with_values(canonical.config, {name: value})
        found = built.compare(changed).worst
        assert found == pytest.approx(Comparator(replace(canonical, config=changed), reference).compare(changed).worst)
        seen.add(found)
    assert len(seen) > 1


def test_an_encoder_only_model() -> None:
    canonical, reference = made(tiny.ENCODER_ALONE)
    certificate = certify(canonical, reference, "alone")
    assert certificate.proven
    assert about(certificate) == {"enc.layers.*.self.k.bias", "source length"}


def test_a_reference_without_padding_does_not_prove_the_mask() -> None:
    canonical, reference = made(tiny.VARIANTS["post"], padded=False)
    assert about(certify(canonical, reference, "blind")) == {"source mask", *K_BIASES, *LENGTHS}


def test_equal_norms_hide_only_their_own_switch() -> None:
    """Gains of 0 behind a norm make everything in front of it invisible, and the certificate says so."""
    canonical, reference = made(tiny.VARIANTS["post"])
    tensors = {
        name: torch.zeros_like(tensor) if name.endswith("fc2.weight") else tensor
        for name, tensor in canonical.tensors.items()
    }
    silent = replace(canonical, tensors=tensors)
    model = Transformer(canonical.config).double().eval()
    model.load_state_dict(tensors)
    with torch.no_grad():
        logits = model(reference.source_ids, reference.source_mask, reference.target_ids)
    certificate = certify(silent, replace(reference, logits=logits), "silent")
    hidden = {f"{side}.layers.*.ffn.fc1.{kind}" for side in ("enc", "dec") for kind in ("weight", "bias")}
    assert about(certificate) >= {*hidden, "activation"}


def swapped(one: str, other: str, side: str = "") -> Callable[[Canonical], Canonical]:
    names = {f".{one}.": f".{other}.", f".{other}.": f".{one}."}

    def renamed(name: str) -> str:
        here = next((here for here in names if here in name and name.startswith(side)), "")
        return name.replace(here, names[here]) if here else name

    return lambda canonical: replace(canonical, tensors={renamed(n): tensor for n, tensor in canonical.tensors.items()})


def zeroed(name: str) -> Callable[[Canonical], Canonical]:
    return lambda canonical: replace(
        canonical, tensors={n: torch.zeros_like(t) if n.endswith(name) else t for n, t in canonical.tensors.items()}
    )


MUTATIONS: dict[str, Callable[[Canonical], Canonical]] = {
    "norms swapped": swapped("norm1", "norm2"),
    "k and v swapped": swapped("k", "v"),
    "q and o swapped": swapped("q", "o"),
    "self and cross swapped": swapped("self", "cross", "dec."),
    "layers swapped": swapped("0", "1"),
    "embedding scale": lambda canonical: replace(canonical, config=replace(canonical.config, embedding_scale=2.0)),
    "v bias": zeroed("v.bias"),
    "output bias": zeroed("out.bias"),
    "positions": zeroed("dec.pos"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_setting_is_not_proven(name: str) -> None:
    canonical, reference = made(tiny.VARIANTS["post"])
    certificate = certify(MUTATIONS[name](canonical), reference, name)
    assert not certificate.proven
    assert certificate.error is not None
    assert certificate.error > 100 * 1e-9


def shared_in_turn(canonical: Canonical) -> Canonical:
    """Give every head keys and values of its own: those of the next head of them, instead of some side by side."""
    tensors = {
        name: tensor.unflatten(0, (2, 8)).repeat(2, 1, 1).flatten(0, 1)
        if name.startswith("enc.") and name.endswith(("k.weight", "v.weight"))
        else tensor
        for name, tensor in canonical.tensors.items()
    }
    encoder = replace(canonical.config.encoder, num_kv_heads=None)
    return replace(canonical, config=replace(canonical.config, encoder=encoder), tensors=tensors)


def test_heads_that_share_keys_in_another_order_are_noticed() -> None:
    canonical, reference = made(tiny.VARIANTS["modern"])
    comparator = Comparator(mutated := shared_in_turn(canonical), reference)
    assert comparator.compare(mutated.config).worst > 100 * 1e-9


def test_the_certificate_is_small_json_and_is_shown(tmp_path: Path) -> None:
    canonical, reference = made(tiny.VARIANTS["post"])
    certificate = certify(canonical, reference, "mine")
    certificate = replace(certificate, tensors={"a": "used", "b": "used", "c.*": "ignored: decoder, 12 tensors"})
    text = json.dumps(certificate.to_dict(), indent=2)
    assert len(text) < 20_000
    assert json.loads(text)["unverified"] == list(certificate.unverified)
    save_model(tiny.model(canonical.config, dtype=torch.float32), tmp_path / "m")
    (tmp_path / "m" / CERTIFICATE).write_text(text, encoding="utf-8")
    shown = run("inspect", tmp_path / "m")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "Certificate" in shown.output
    assert "layout mine, error" in shown.output
    assert "\n  proven: " in shown.output
    assert "tensors of the checkpoint: 12 ignored, 2 used\n" in shown.output
    assert "enc.layers.*.self.k.bias: makes no difference" in shown.output
    assert inspect_path(tmp_path / "m")["certificate"]["proven"] is True


def test_without_a_reference_the_certificate_states_it(tmp_path: Path) -> None:
    save_model(tiny.model(tiny.config(), dtype=torch.float32), tmp_path / "m")
    assert "Certificate" not in run("inspect", tmp_path / "m").output
    assert inspect_path(tmp_path / "m")["status"] == "unproven"
    (tmp_path / "m" / CERTIFICATE).write_text(
        json.dumps(Certificate(layout="guess", proven=False).to_dict()), encoding="utf-8"
    )
    shown = run("inspect", tmp_path / "m").output
    assert "\n  unproven: " in shown
    assert "layout guess\n" in shown


@pytest.mark.parametrize(("proven", "status"), [(True, "proven"), (False, "unproven")])
def test_a_certificate_of_an_earlier_version_has_the_status_of_its_fields(
    proven: bool, status: str, tmp_path: Path
) -> None:
    save_model(tiny.model(tiny.config(), dtype=torch.float32), tmp_path / "m")
    certificate = Certificate(layout="mine", proven=proven, error=1e-12, tolerance=1e-9).to_dict()
    old = {name: value for name, value in certificate.items() if name not in ("status", "proof")}
    (tmp_path / "m" / CERTIFICATE).write_text(json.dumps(old), encoding="utf-8")
    found = inspect_path(tmp_path / "m")
    assert (found["status"], found["certificate"]["status"]) == (status, status)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"proven": true}', '{"layout": 3, "proven": "yes"}'])
def test_a_damaged_certificate_is_one_line(content: str, tmp_path: Path) -> None:
    save_model(tiny.model(tiny.config(), dtype=torch.float32), tmp_path / "m")
    (tmp_path / "m" / CERTIFICATE).write_text(content, encoding="utf-8")
    shown = ran("inspect", tmp_path / "m", code=1)
    assert shown.stderr.startswith("error: ")
    assert "certificate.json" in shown.stderr
    assert shown.stderr.count("\n") == 1
