"""Save the graphs of engines with inputs, and find layers that lose precision."""
