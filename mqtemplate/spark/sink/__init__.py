"""Sink: rows of a DataFrame as messages."""
