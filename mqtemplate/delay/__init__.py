"""Delayed messages: delay levels and timers over the store, and the release of messages that are due."""
