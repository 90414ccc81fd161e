"""Run TensorRT engines as a backend."""
