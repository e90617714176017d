"""Interventions on a model: remove terms, cut windows, and measure the effect on predictions."""
