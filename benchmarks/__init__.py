"""Speed, measured side by side in one run; never in a test."""
