"""Re-export `tfexport.integrations.ray.app` for old Ray Serve configurations."""

from __future__ import annotations

from tfexport.integrations.ray import app

__all__ = ["app"]
