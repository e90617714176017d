"""Connects runs, analyses and results: jobs and tasks, and how they are executed."""
