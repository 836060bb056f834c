"""Patterns of topics: a listener reads all topics whose names match, also those that are created later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def is_pattern(topic: str) -> bool:
    """Return True for the name of several topics, such as ``orders-*``: no topic has these characters."""
    return any(character in topic for character in "*?[")


def matching(patterns: Sequence[str], topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics whose names match one of the patterns, sorted."""
    return tuple(sorted(topic for topic in topics if any(fnmatchcase(topic, pattern) for pattern in patterns)))
