"""Convert the state dicts of other implementations to the canonical model."""
