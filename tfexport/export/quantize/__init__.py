"""Quantize matrices to 8 and 4 bits, for ONNX Runtime and for TensorRT."""
