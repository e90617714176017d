"""Extras: the planted demonstration dataset, the bundled model family, push and pull, verify and doctor."""
