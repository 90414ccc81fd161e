"""ONNX Runtime as a backend: the session, its caches, device memory, and what moves rows there."""
