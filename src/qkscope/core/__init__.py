"""The mathematics: NumPy and SciPy only; no files, no torch, no logging."""
