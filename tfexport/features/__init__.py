"""Turn audio and images into the features that encoders take instead of token ids."""
