"""Import the checkpoints of other implementations as model directories."""
