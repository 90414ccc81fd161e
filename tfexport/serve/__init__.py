"""Serving: many callers, one model; rows join and leave the batches that are decoded."""
