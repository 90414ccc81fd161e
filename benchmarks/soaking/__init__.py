"""A soak: mixed load for hours on a server and in process, and what the two processes hold meanwhile."""
