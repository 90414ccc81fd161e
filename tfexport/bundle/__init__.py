"""The bundle: one directory that holds a model's graphs, weights and what is known of them."""
