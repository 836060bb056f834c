"""Contradictions between the keys of a section."""

from __future__ import annotations


class ContradictionError(ValueError):
    """Two keys that exclude each other, or a key that lacks another one.

    Attributes:
        keys: Paths of the keys below the section that raises. The error message names the first one that was written,
            with its file and line.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


def check_both_or_none(section: object, first: str, second: str, reason: str = "; give both or none") -> None:
    """Raise `ContradictionError` if only one of two fields has a value."""
    has_first, has_second = (getattr(section, name) is not None for name in (first, second))
    if has_first != has_second:
        given, missing = (first, second) if has_first else (second, first)
        raise ContradictionError(f"needs '{missing.replace('_', '-')}' beside it{reason}", given)
