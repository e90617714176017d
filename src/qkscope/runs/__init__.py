"""What can be analysed: runs, their heads, where their vectors come from."""
