"""Bytes on disk and on the Hub."""
