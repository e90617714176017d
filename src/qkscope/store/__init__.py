"""The only code that touches a disk or the Hub."""
