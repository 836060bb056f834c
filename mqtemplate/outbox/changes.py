"""Changes of messages that an outbox has: cancels and reschedules, in their order with the messages.

A change is a row of its own. The relay executes it at the broker, after the messages before it. Before it sends a
message it looks for the changes after it: a cancelled message is not sent, and a moved one is sent with its last time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.durations import Duration
from mqtemplate.errors import MessageError
from mqtemplate.message import DELAY_PROPERTIES, Property, key_text, split_keys
from mqtemplate.outbox.database import (
    KEY_LENGTH,
    Execute,
    OutboxChange,
    OutboxEntry,
    OutboxRow,
    add_change,
    delete_rows,
    has_changes,
    move_row,
    read_changes,
    search_rows,
    search_waiting,
)
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.template.delays import deliver_time
from mqtemplate.topics import check_given_topic
from mqtemplate.user_code import shown


def cancel_of(key: object, topic: object) -> OutboxChange:
    """Return a cancel for the outbox.

    Raises:
        MessageError: The key is not one word of up to 255 characters, or the topic is not a legal name.
    """
    return OutboxChange(key=_change_key(key), topic=None if topic is None else check_given_topic(topic))


def reschedule_of(
    key: object, topic: object, delay: Duration | None, deliver_at: datetime | int | None, now_ms: int
) -> OutboxChange:
    """Return a reschedule for the outbox: to *now_ms* if neither *delay* nor *deliver_at* is given.

    Raises:
        MessageError: As `cancel_of`; or the time is invalid.
    """
    return replace(cancel_of(key, topic), deliver_ms=deliver_time(delay, deliver_at, now_ms))


def _change_key(key: object) -> str:
    text = key_text(key)
    if len(text) > KEY_LENGTH:
        raise MessageError(
            f"a change in an outbox takes a key of at most {KEY_LENGTH} characters, got {len(text)}: {shown(text)}; "
            "name the message by its message id"
        )
    return text


class PlannedRow(NamedTuple):
    """One row that is to be relayed, and the effect of the changes after it.

    Attributes:
        entry: The row as it is in the table.
        is_void: True for a message that was cancelled, and for a reschedule that a later change replaces.
        deliver_ms: The last deliver time that a message was moved to; None if it was not moved.
    """

    entry: OutboxEntry
    is_void: bool = False
    deliver_ms: int | None = None


class _Named(NamedTuple):
    """Names by which a change means a message."""

    msg_id: str
    keys: frozenset[str]
    topic: str
    is_delayed: bool


def names_of(entry: OutboxEntry) -> set[str]:
    """Return the keys by which a change can mean a row: message id and keys of a message, the key of a change."""
    if isinstance(entry, OutboxChange):
        return {entry.key}
    named = _named(entry)
    return {named.msg_id, *named.keys}


def read_later(execute: Execute, entries: Iterable[OutboxEntry], after_id: int) -> list[OutboxChange]:
    """Return the changes after a position that may mean some of *entries*."""
    if not has_changes(execute, after_id):  # the usual case, which needs no names
        return []
    return read_changes(execute, {name for entry in entries for name in names_of(entry)}, after_id)


def moved(row: OutboxRow, deliver_ms: int) -> OutboxRow:
    """Return a message with another deliver time."""
    properties = {name: value for name, value in json.loads(row.properties).items() if name not in DELAY_PROPERTIES}
    return replace(row, properties=json.dumps(properties | {Property.TIMER_DELIVER_MS: str(deliver_ms)}))


def change_waiting(execute: Execute, entries: Iterable[OutboxEntry]) -> None:
    """Apply the changes among *entries* to the messages before them that wait in the table."""
    for change in entries:
        if not isinstance(change, OutboxChange):
            continue
        meant = [row for row in search_waiting(execute, change.key, change.id) if _is_meant(_named(row), change)]
        if change.deliver_ms is None:
            delete_rows(execute, [row.id for row in meant])
        else:
            for row in meant:
                move_row(execute, moved(row, change.deliver_ms))


def plan(entries: Sequence[OutboxEntry], later: Iterable[OutboxChange] = ()) -> list[PlannedRow]:
    """Return rows with the effect of the changes after them.

    Args:
        entries: Rows in the order of the table, with the changes among them.
        later: Changes that are in the table after *entries*.
    """
    changes = [*later, *(entry for entry in entries if isinstance(entry, OutboxChange))]
    if not changes:
        return [PlannedRow(entry) for entry in entries]
    by_key: defaultdict[str, list[OutboxChange]] = defaultdict(list)
    for change in sorted(changes, key=lambda change: change.id):
        by_key[change.key].append(change)
    return [_planned(entry, by_key) for entry in entries]


def _planned(entry: OutboxEntry, by_key: Mapping[str, list[OutboxChange]]) -> PlannedRow:
    later = [change for name in names_of(entry) for change in by_key.get(name, ()) if change.id > entry.id]
    if isinstance(entry, OutboxChange):
        # At the broker it would move messages to a time that may be over, before the later change is executed. A
        # cancel has no such state between, and the messages after it may be meant by the later change only.
        is_replaced = any(change.topic in (None, entry.topic) for change in later)
        return PlannedRow(entry, is_void=entry.deliver_ms is not None and is_replaced)
    named, deliver_ms = _named(entry), None
    for change in sorted(later, key=lambda change: change.id):
        if _is_meant(named, change):
            if change.deliver_ms is None:
                return PlannedRow(entry, is_void=True)
            deliver_ms = change.deliver_ms
            named = named._replace(is_delayed=True)
    return PlannedRow(entry, deliver_ms=deliver_ms)


def _named(row: OutboxRow) -> _Named:
    properties = json.loads(row.properties)
    keys = frozenset(split_keys(properties.get(Property.KEYS)))
    return _Named(row.msg_id, keys, row.topic, any(name in properties for name in DELAY_PROPERTIES))


def _is_meant(named: _Named, change: OutboxChange) -> bool:
    """Return True if a change means a message.

    A key means delayed messages only, as at the broker: an event without a delay that has the key of a reminder would
    be at the broker by now, and not pending. A message id names one message.
    """
    is_named = change.key == named.msg_id or (named.is_delayed and change.key in named.keys)
    return is_named and change.topic in (None, named.topic)


# --- changes by `template.cancel` and `template.reschedule` ------------------------------------------


class UnsentMessages:
    """Messages that the relay has not sent yet, changed outside of a transaction of the caller.

    Each method works in a transaction of its own, so that a search does not keep other writers waiting.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def find(self, execute: Execute, change: OutboxChange) -> list[PlannedRow]:
        """Return the messages that a change means, and their state after the changes that are in the table already."""
        rows = [row for row in search_rows(execute, change.key) if _is_meant(_named(row), change)]
        return plan(rows, read_later(execute, rows, rows[0].id)) if rows else []

    def add(self, execute: Execute, found: Sequence[PlannedRow], change: OutboxChange) -> ScheduleChange:
        """Change the messages that were found, and return the result.

        Each one is changed by its message id: the caller asks the broker for the other messages with the key. And a
        message that the caller sends to the broker afterwards is not changed by the relay.
        """
        names = [row.entry.msg_id for row in found if not row.is_void and isinstance(row.entry, OutboxRow)]
        for name in names:
            self.defer(execute, OutboxChange(key=name, deliver_ms=change.deliver_ms))
        if not names or change.deliver_ms is None:
            return ScheduleChange(ScheduleChangeStatus.CANCELLED, len(names))
        return ScheduleChange(ScheduleChangeStatus.RESCHEDULED, len(names))

    def defer(self, execute: Execute, change: OutboxChange) -> None:
        """Add a change, which the relay executes at the broker."""
        add_change(execute, change, self._clock.now_ms())
