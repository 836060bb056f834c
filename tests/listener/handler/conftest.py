"""The fixtures of these tests."""

from tests.kit import kit

__all__ = ["kit"]
