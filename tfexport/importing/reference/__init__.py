"""The reference: what the original computed, and how an import is compared with it."""
