"""The bridge to TensorRT 10, 11 and TensorRT-RTX: library, CUDA and log, shared by building and driving."""
