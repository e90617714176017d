"""Measure a model on texts and write a run; needs torch and transformers."""
