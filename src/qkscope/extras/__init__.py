"""What is in the box besides: the demonstration, the bundled family, verify, doctor."""
