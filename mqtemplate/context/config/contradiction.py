"""The error that a section of the configuration raises for keys that exclude each other."""

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
