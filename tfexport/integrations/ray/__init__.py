"""Serve bundles with Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfexport.integrations.ray._arguments import Arguments

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Arguments", "app"]


def app(arguments: Mapping[str, Any]) -> Application:
    """Build the Ray Serve application from arguments or a configuration file.

    `serve run tfexport.integrations.ray:app bundle=…` calls it. Only the replicas read the bundles, on their nodes.

    Args:
        arguments: fields of `Arguments`; values from a command line may be text.

    Raises:
        ConfigError: lists every argument that is unknown, missing or invalid.
    """
    from tfexport.integrations.ray._replica import deployment_of

    found = Arguments.read(arguments)
    return deployment_of(found).bind(found)
