"""A loaded bundle: text in, text out."""
