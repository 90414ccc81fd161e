"""The eager model that a bundle is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tfexport.bundle.bundle import Bundle
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.importing.own_module import OwnModule, is_own_module, load_own_module
from tfexport.nn.directory import load_model
from tfexport.nn.eager import EagerModel
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import load_eager_model

_LENGTHS = ("max_source_length", "max_target_length")


def reference_of(bundle: Bundle, against: str | None) -> EagerModel:
    """Return the model to compare a bundle with.

    Args:
        bundle: opened and checked.
        against: a model directory, or PACKAGE.MODULE:FACTORY, whose code is imported and run. None uses the weights of
            the bundle itself; no code that the bundle names is run.
    """
    if against is None:
        return EagerModel(_own_weights(bundle))
    if is_own_module(against):
        return _own_module(bundle, load_own_module(against), against)
    return _directory(bundle, Path(against))


def _own_weights(bundle: Bundle) -> Transformer:
    manifest = bundle.manifest
    if manifest.config is not None and manifest.quantization is None:
        return load_eager_model(bundle)
    what = f"{manifest.accuracy} weights" if manifest.quantization else "graphs"
    whose = "model directory" if manifest.config is not None else "PACKAGE.MODULE:FACTORY"
    raise BundleError(
        f"{bundle.path}: holds {what} and no model to compare with; "
        f"give the {whose} that it was made from with --against"
    )


def _own_module(bundle: Bundle, own: OwnModule, against: str) -> EagerModel:
    manifest = bundle.manifest
    expected, ours = manifest.spec.to_dict(), replace(own.spec, precision=manifest.spec.precision).to_dict()
    problems = [
        f"{name} is {ours[name]}, the bundle has {value}"
        for name, value in expected.items()
        if (ours[name] < value if name in _LENGTHS else ours[name] != value)  # its limits may be lower
    ]
    if not problems and manifest.module is not None:
        found, made_from = own.entry().weights_sha256, manifest.module.weights_sha256
        if found != made_from:
            problems.append(f"its weights have the sha256 {found}, the bundle was made from {made_from}")
    raise_all(ConfigError, f"{against} is not the module of this bundle", problems)
    return own.model


def _directory(bundle: Bundle, against: Path) -> EagerModel:
    model, theirs = load_model(against), bundle.manifest.config
    if theirs is None:
        raise BundleError(
            f"{bundle.path}: was made from a module of your own, so {against} cannot be its reference; "
            "give --against PACKAGE.MODULE:FACTORY"
        )
    ours, expected = model.config.to_dict(), theirs.to_dict()
    differing = [key for key in expected if key not in _LENGTHS and ours[key] != expected[key]]
    if theirs.positions == "table":  # a bundle may have lower limits than its model, not higher ones
        differing += [key for key in _LENGTHS if (ours[key] or 0) < (expected[key] or 0)]
    raise_all(
        ConfigError,
        f"{against} is not the model of this bundle",
        [f"{key} is {ours[key]}, the bundle has {expected[key]}" for key in differing],
    )
    return EagerModel(model)
