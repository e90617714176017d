"""Bundled data: the tinyrope model family and planted heads."""
