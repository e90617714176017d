"""Exports: calibration files of other people's tools for KV caches, from what a run keeps."""
