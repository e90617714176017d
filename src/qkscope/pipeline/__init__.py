"""The only wiring: jobs, tasks, and how they are done."""
