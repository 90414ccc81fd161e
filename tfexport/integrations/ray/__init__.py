"""Bundles as an application of Ray Serve: replicas on many machines, one engine a model and replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfexport.integrations.ray.arguments import Arguments

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Arguments", "app"]


def app(arguments: Mapping[str, Any]) -> Application:
    """Build the application, as `serve run tfexport.integrations.ray:app bundle=…` and configuration files ask for it.

    No bundle is read here: replicas do that, where they run.

    Args:
        arguments: fields of `Arguments`; as texts where they come from a command line.

    Raises:
        ConfigError: lists every argument that is unknown, missing or wrong.
    """
    from tfexport.integrations.ray.replica import deployment_of

    found = Arguments.read(arguments)
    return deployment_of(found).bind(found)
