"""Detection: which layout reads a checkpoint, from its names, indices and shapes."""
