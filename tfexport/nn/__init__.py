"""The canonical transformer in PyTorch, the reference for every stage."""
