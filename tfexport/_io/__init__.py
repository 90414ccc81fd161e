"""Read and write files: strict JSON, sealed JSON, atomic files and directories."""
