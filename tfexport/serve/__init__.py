"""Serve one or more models to concurrent callers with continuous batching."""
