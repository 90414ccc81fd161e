"""The comparison with other systems on the same weights: who takes part, in which sizes, and what came of it."""
