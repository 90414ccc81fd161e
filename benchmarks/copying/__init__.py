"""Small models that copy, for benchmarks/speculation.py."""
