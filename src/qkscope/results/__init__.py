"""Results folders: tables, their schema, summary."""
