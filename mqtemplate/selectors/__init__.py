"""Selectors: which messages of a topic a consumer group receives, by tags or by an SQL92 expression."""
