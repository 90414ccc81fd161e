"""One graph that holds the whole greedy search: ids in, ids out."""
