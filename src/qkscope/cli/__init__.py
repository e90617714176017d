"""Parse, call the pipeline, print."""
