"""Checkpoints of other implementations: read, mapped by a layout, proven by a golden, written as a model directory."""
