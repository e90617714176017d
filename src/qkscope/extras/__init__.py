"""Extras: the planted demonstration dataset, the bundled model family, verify and doctor."""
