"""Moments in, tidy tables out; pure, one idea per file."""
