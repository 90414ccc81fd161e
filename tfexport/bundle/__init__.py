"""Read and write bundles."""
