"""Whole files through a model: read in parts, decoded, kept part by part, joined in the end.

A run goes on where a killed one ended, and each row of the input has one row of the output, in its order:

    input ─scan→ parts ─decode→ OUTPUT.parts/part-….jsonl ─join with the input→ OUTPUT
"""
