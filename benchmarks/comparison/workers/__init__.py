"""One program for each system, run in that system's own environment and driven by `protocol`."""
