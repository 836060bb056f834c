"""Processors of the requests of administration tools such as ``mqadmin`` and the dashboard."""
