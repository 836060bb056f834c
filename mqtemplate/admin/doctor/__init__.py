"""Offline check of a store directory: sizes, damage, pending messages, groups, and what a start would do."""
