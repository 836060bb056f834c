"""Cursors of lists of stored messages: the position of the last message of a page."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

from mqtemplate.errors import MessageError
from mqtemplate.message import MessageExt
from mqtemplate.numbers import parse_number

T = TypeVar("T")


def cursor_of(message: MessageExt) -> str:
    """Return the cursor of the page after *message*."""
    return f"{message.store_timestamp}-{message.physical_offset}"


def parse_cursor(text: str | None) -> tuple[int, int]:
    """Return store time and physical offset of a cursor; (0, -1) for the first page.

    Raises:
        MessageError: It is no cursor.
    """
    if text is None:
        return 0, -1
    store_ms, offset = map(parse_number, text.partition("-")[::2])
    if store_ms is None or offset is None:
        raise MessageError(f"{text!r:.64} is no cursor; go back to the first page")
    return store_ms, offset


def is_after(message: MessageExt, cursor: tuple[int, int]) -> bool:
    """Return True if a message is after the position of a cursor."""
    return (message.store_timestamp, message.physical_offset) > cursor


def first_of(items: Iterable[T], count: int) -> tuple[list[T], bool]:
    """Return the first items, and True if there are more."""
    found = list(islice(items, count + 1))
    return found[:count], len(found) > count
