"""Scripts that write and check parts of the docs, and check results and distributions."""
