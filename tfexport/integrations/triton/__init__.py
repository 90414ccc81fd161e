"""Models for Triton Inference Server: a repository around bundles, and what runs in Triton's Python backend."""
