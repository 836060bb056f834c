"""Listener containers: fetching messages, calling handlers, and committing progress."""
