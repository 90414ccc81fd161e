"""Transformers as people write them from scratch, one file each, in plain PyTorch.

Each reproduces the keys, shapes and arithmetic of a public implementation or of another style, not its code, and its
docstring names what is unusual. `forward(source_ids, source_mask, target_ids)` returns logits or log-probabilities,
[batch, target_len, target_vocab]; encoders without a decoder return hidden states. Masks are True for tokens. `parts`
and `pieces` hold what several of them share. Nothing here imports tfexport.
"""
