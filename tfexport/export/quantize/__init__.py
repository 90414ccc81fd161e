"""Matrices in 8 and 4 bits: for ONNX Runtime's integer operators, and as Q/DQ for TensorRT."""
