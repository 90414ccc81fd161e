"""From graphs to TensorRT engines: one bridge to TensorRT 10, 11 and TensorRT-RTX, profiles, builds, manifests."""
