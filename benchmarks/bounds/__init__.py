"""What a step of a decoder cannot be faster than, and where the rest of its time goes."""
