"""Consumption of messages: listener container, process queues, consume services and consume threads."""
