"""The eager model that a bundle is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfexport.bundle.bundle import Bundle
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.importing.own_module import OwnModule, is_own_module, load_own_module
from tfexport.nn.directory import load_model
from tfexport.nn.eager import EagerModel
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import load_eager_model

_LENGTHS = ("max_source_length", "max_target_length")


def reference_of(bundle: Bundle, against: str | None) -> EagerModel:
    """Return the model to compare a bundle with; see `verify_bundle`."""
    if against is None:
        return EagerModel(_own_weights(bundle))
    if is_own_module(against):
        return _own_module(bundle, load_own_module(against), against)
    model, config = load_model(Path(against)), bundle.manifest.config
    if config is None:
        raise BundleError(
            f"{bundle.path}: was made from a module of your own, so {against} cannot be its reference; "
            "give --against PACKAGE.MODULE:FACTORY"
        )
    problems = _differences(model.config.to_dict(), config.to_dict(), has_limits=config.positions == "table")
    raise_all(ConfigError, f"{against} is not the model of this bundle", problems)
    return EagerModel(model)


def _own_weights(bundle: Bundle) -> Transformer:
    manifest = bundle.manifest
    if manifest.config is not None and manifest.quantization is None:
        return load_eager_model(bundle)
    content = f"{manifest.accuracy} weights" if manifest.quantization else "graphs"
    source = "model directory" if manifest.config is not None else "PACKAGE.MODULE:FACTORY"
    raise BundleError(
        f"{bundle.path}: holds {content} and no model to compare with; "
        f"give the {source} that it was made from with --against"
    )


def _own_module(bundle: Bundle, own: OwnModule, against: str) -> EagerModel:
    spec, recorded = bundle.manifest.spec, bundle.manifest.module
    problems = _differences(replace(own.spec, precision=spec.precision).to_dict(), spec.to_dict())
    if not problems and recorded is not None and (found := own.entry().weights_sha256) != recorded.weights_sha256:
        problems.append(f"its weights have the sha256 {found}, the bundle was made from {recorded.weights_sha256}")
    raise_all(ConfigError, f"{against} is not the module of this bundle", problems)
    return own.model


def _differences(ours: Mapping[str, Any], expected: Mapping[str, Any], *, has_limits: bool = True) -> list[str]:
    """Describe the differences; a bundle may have lower limits than its model."""
    return [
        f"{name} is {ours[name]}, the bundle has {value}"
        for name, value in expected.items()
        if (has_limits and (ours[name] or 0) < (value or 0) if name in _LENGTHS else ours[name] != value)
    ]
