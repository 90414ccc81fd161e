"""Convert texts to token ids and back, and check this with recorded texts."""
