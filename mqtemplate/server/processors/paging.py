"""Pages of the lists of topics and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def page(table: Mapping[str, T], start: int, count: int | None) -> dict[str, T]:
    """Return *count* entries of *table* from *start* on, sorted by name.

    Clients before 5.x request no page: *start* is 0 and *count* is None.
    """
    names = sorted(table)[start : None if count is None else start + count]
    return {name: table[name] for name in names}
