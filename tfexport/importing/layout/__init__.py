"""Layouts: how the state dict of another implementation becomes the canonical model."""
