"""The acceptance on a GPU: its parts, each in a process of its own, and the report."""
