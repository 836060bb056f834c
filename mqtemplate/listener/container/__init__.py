"""Listener containers: they fetch, have messages handled, and commit."""
