"""Consume queues: the positions of the messages of each queue in the commit log."""
