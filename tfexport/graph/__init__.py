"""From a PyTorch model to ONNX graphs: trace, append selection, share weights, check the contract."""
