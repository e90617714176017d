"""The input of analyses: runs, their heads, and the sources of their vectors."""
