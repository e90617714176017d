"""What can be analysed: runs, their heads, and the sources of their vectors."""
