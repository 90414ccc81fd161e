"""Record the outputs of the original model and compare an import with them."""
