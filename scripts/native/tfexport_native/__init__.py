"""The compiled libraries of tfexport's backend `native`, one for each set of instructions."""
