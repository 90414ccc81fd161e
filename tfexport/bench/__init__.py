"""Measure how fast a bundle generates; report a table, JSON and an HTML page."""
