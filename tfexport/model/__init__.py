"""Load a bundle, and generate, score, align and embed with it."""
