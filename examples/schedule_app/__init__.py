"""The Spring-like application: a service sends a delayed message, a listener receives it ten seconds later."""
