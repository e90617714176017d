"""Export a run as calibration files of other tools."""
