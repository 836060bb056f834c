"""Transactions of the embedded broker: half messages, their ends, and transaction checks."""
