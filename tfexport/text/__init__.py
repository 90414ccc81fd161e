"""What goes around the ids of a model: tokenizers, special ids, and texts that prove them."""
