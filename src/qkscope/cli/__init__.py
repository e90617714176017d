"""The command line: parse arguments, call the pipeline, print results."""
