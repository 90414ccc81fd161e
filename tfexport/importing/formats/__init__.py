"""The formats that checkpoints, configurations and vocabularies come in."""
