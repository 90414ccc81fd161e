"""Detect the layout of a checkpoint from its names, indices and shapes."""
