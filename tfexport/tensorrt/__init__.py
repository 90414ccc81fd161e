"""Build and run engines of TensorRT 10, TensorRT 11 and TensorRT-RTX."""
