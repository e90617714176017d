"""A run as calibration files of other tools."""
