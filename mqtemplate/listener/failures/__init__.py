"""Failures of handlers: whether and when a message is retried, its dead letter, and the log events."""
