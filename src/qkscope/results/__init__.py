"""Results: tables computed from runs, written and read, and studies made of them."""
