"""Requests of administration tools such as mqadmin."""
