"""POP: consumption of messages one by one, without queues that belong to consumers."""
