"""Run a bundle in a session of any backend, all with one interface."""
