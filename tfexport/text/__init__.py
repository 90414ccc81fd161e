"""Convert texts to token ids and back, and check the conversion with recorded texts."""
