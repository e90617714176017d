"""Tables and figures into self-contained HTML: the report and the explorer."""
