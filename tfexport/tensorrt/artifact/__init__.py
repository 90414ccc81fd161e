"""Engines on disk: their manifest, their place in a bundle, and where they may be used."""
