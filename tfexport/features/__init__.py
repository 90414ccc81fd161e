"""Turn audio and images into the features that encoders take instead of token ids.

`config` declares what is computed, `processor` computes it from files or arrays, and the other modules are its parts.
"""
