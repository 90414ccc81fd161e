"""TensorRT engines as a backend: the session, and the parts of one replica that decodes a batch on the GPU."""
