"""Run exported graphs in ONNX Runtime."""

import os

# Otherwise ONNX Runtime on Linux sends telemetry. It reads the variable when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
