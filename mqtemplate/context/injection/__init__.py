"""Dependency injection: definitions of components and the resolution of constructor parameters."""
