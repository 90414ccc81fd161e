"""Measure how fast a bundle generates, and report it as a table, JSON and an HTML page."""
