"""What is done to a graph once it is traced or loaded: one pass a file."""
