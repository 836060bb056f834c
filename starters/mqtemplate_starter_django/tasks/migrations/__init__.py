"""Migrations of the results."""
