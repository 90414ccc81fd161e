"""The formats of files: one sibling each, told by the suffix."""
