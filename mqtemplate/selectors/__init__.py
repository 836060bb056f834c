"""Selectors: they decide which messages of a topic a consumer group receives, by tag or by an SQL92 expression."""
