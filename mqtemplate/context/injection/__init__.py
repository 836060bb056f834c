"""Dependency injection: what an application contains, and which object each constructor gets."""
