"""Measuring: how fast a bundle generates, in what time and memory, as a table, as JSON and as a page."""
