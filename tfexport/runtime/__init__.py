"""Sessions: a model on a backend, behind one interface."""
