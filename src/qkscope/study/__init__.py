"""Ordered runs with labels."""
