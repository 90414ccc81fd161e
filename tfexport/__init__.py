"""Take a from-scratch encoder-decoder transformer from PyTorch to production."""
