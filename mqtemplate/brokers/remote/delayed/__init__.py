"""Pending messages of a cluster: one implementation of `DelayedMessages` for each kind of broker."""
