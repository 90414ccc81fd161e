"""Former name of `tfexport.integrations.ray`, kept for existing Ray Serve configurations."""

from __future__ import annotations

from tfexport.integrations.ray import app

__all__ = ["app"]
