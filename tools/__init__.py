"""Builds what the documents show."""
