"""Run small models on CPUs in the compiled library `tfexport-native`.

ONNX Runtime takes longer to start the kernels of a step of a small model than to compute them. The sources of the
library are in `scripts/native`.
"""
