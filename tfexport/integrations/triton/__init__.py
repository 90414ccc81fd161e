"""Serve bundles with the Python backend of Triton Inference Server."""
