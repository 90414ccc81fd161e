"""Generate for whole files: stage the input in parts, decode each part, join the parts into the output.

A run that was killed resumes from its finished parts, and each row of the input has one row in the output, in order:

    input ─stage→ OUTPUT.parts/{texts,rows}.parquet ─decode→ OUTPUT.parts/part-….parquet ─join→ OUTPUT
"""
