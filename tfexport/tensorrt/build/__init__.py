"""From graphs to TensorRT engines: resolve, profiles, network, builder."""
