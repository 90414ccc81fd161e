"""Generate for whole files: stage the input in parts, decode and join them.

A run that was killed resumes from its finished parts. Row n of the output belongs to row n of the input:

    input ─stage→ OUTPUT.parts/{texts,rows}.parquet ─decode→ OUTPUT.parts/part-….parquet ─join→ OUTPUT
"""
