"""Pulls: records as bytes, read together and ahead, and pulls that wait for a message."""
