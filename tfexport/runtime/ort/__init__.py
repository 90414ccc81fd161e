"""ONNX Runtime as a backend: the session, its caches, device memory, and what moves rows there."""

import os

# Its builds for Linux call their maker's servers otherwise; they look at this while they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
