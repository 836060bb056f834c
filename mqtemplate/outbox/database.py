"""The three tables and every statement on them, for SQLite and PostgreSQL.

Parameters are written ``:name``; an integration translates them. The integrations declare the tables in their own way:
`mqtemplate.outbox.sqlalchemy` as ``Table``, `mqtemplate.outbox.django` as models. All use these names::

    mqtemplate_outbox        id, msg_id, topic, hash_key, properties, body, created_ms, error
    mqtemplate_outbox_lease  id, owner, until_ms
    mqtemplate_inbox         consumer, msg_id, received_ms
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import Message

OUTBOX, LEASE_TABLE, INBOX = "mqtemplate_outbox", "mqtemplate_outbox_lease", "mqtemplate_inbox"
DATABASES = ("sqlite", "postgresql")

_LONGEST_LEASE = 10
"""A lease that is longer than this many times that of this process was set by a clock that was ahead."""
_CLOCK_SKEW_MS = 60_000

_ADD = (
    f"INSERT INTO {OUTBOX} (msg_id, topic, hash_key, properties, body, created_ms) "
    "VALUES (:msg_id, :topic, :hash_key, :properties, :body, :created_ms)"
)
_READ = (
    f"SELECT id, msg_id, topic, hash_key, properties, body FROM {OUTBOX} WHERE error IS NULL ORDER BY id LIMIT :count"
)
_REFUSE = f"UPDATE {OUTBOX} SET error = :error WHERE id = :id"
_ADD_LEASE = f"INSERT INTO {LEASE_TABLE} (id, owner, until_ms) VALUES (1, '', 0) ON CONFLICT (id) DO NOTHING"
_TAKE_LEASE = (
    f"UPDATE {LEASE_TABLE} SET owner = :owner, until_ms = :until_ms "
    "WHERE id = 1 AND (owner = :owner OR until_ms < :now_ms OR until_ms > :latest_ms)"
)
_END_LEASE = f"UPDATE {LEASE_TABLE} SET until_ms = 0 WHERE id = 1 AND owner = :owner"
_RECORD = (
    f"INSERT INTO {INBOX} (consumer, msg_id, received_ms) VALUES (:consumer, :msg_id, :received_ms) "
    "ON CONFLICT (consumer, msg_id) DO NOTHING"
)
_PURGE = (
    f"DELETE FROM {INBOX} WHERE (consumer, msg_id) IN "
    f"(SELECT consumer, msg_id FROM {INBOX} WHERE received_ms < :before_ms ORDER BY received_ms LIMIT :count)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """One message that is to be sent.

    Attributes:
        id: Position in the order of the table; 0 for a row that is not stored yet.
        msg_id: Message id; the same each time that the row is sent.
        hash_key: Messages with equal keys go to one queue; None for any queue.
        properties: Properties of the message as JSON.
    """

    id: int
    msg_id: str
    topic: str
    hash_key: str | None
    properties: str
    body: bytes

    def to_message(self) -> Message:
        """Return the message to send."""
        return Message(self.topic, self.body, json.loads(self.properties))


class Result(NamedTuple):
    """Rows of a query, or the number of rows that a statement changed."""

    rows: Sequence[Sequence[Any]]
    changed: int


Execute: TypeAlias = Callable[[str, Mapping[str, Any]], Result]
"""Function that executes one statement in the current transaction."""


def check_database(name: str) -> None:
    """Raise an error for a database whose SQL differs.

    Raises:
        ConfigurationError: It is neither SQLite nor PostgreSQL.
    """
    if name not in DATABASES:
        raise ConfigurationError(f"outbox and inbox need {' or '.join(DATABASES)}, got {name}")


# --- outbox --------------------------------------------------------------------------------------


def add_rows(execute: Execute, rows: Iterable[OutboxRow], now_ms: int) -> None:
    """Add rows at the end of the outbox."""
    for row in rows:
        execute(
            _ADD,
            {
                "msg_id": row.msg_id,
                "topic": row.topic,
                "hash_key": row.hash_key,
                "properties": row.properties,
                "body": row.body,
                "created_ms": now_ms,
            },
        )


def read_rows(execute: Execute, count: int) -> list[OutboxRow]:
    """Return the first rows that are to be sent."""
    return [
        OutboxRow(id=id_, msg_id=msg_id, topic=topic, hash_key=hash_key, properties=properties, body=bytes(body))
        for id_, msg_id, topic, hash_key, properties, body in execute(_READ, {"count": count}).rows
    ]


def take_lease(execute: Execute, owner: str, now_ms: int, until_ms: int) -> bool:
    """Take or extend the right to relay; return False if another process has it.

    A process whose clock was ahead may have left a lease that ends in years. So one that is far longer than that of
    this process does not count.
    """
    latest_ms = now_ms + _LONGEST_LEASE * (until_ms - now_ms) + _CLOCK_SKEW_MS
    parameters = {"owner": owner, "now_ms": now_ms, "until_ms": until_ms, "latest_ms": latest_ms}
    if execute(_TAKE_LEASE, parameters).changed:
        return True
    execute(_ADD_LEASE, {})  # the first relay of all
    return bool(execute(_TAKE_LEASE, parameters).changed)


def end_lease(execute: Execute, owner: str) -> None:
    """End the right of a process that stops, so that another one continues at once."""
    execute(_END_LEASE, {"owner": owner})


def delete_rows(execute: Execute, ids: Sequence[int]) -> None:
    """Delete rows that were sent."""
    if ids:
        names = [f"id{index}" for index in range(len(ids))]
        places = ", ".join(f":{name}" for name in names)
        execute(f"DELETE FROM {OUTBOX} WHERE id IN ({places})", dict(zip(names, ids, strict=True)))


def refuse_row(execute: Execute, row_id: int, error: str) -> None:
    """Keep a row that cannot be sent, with the reason; it is not tried again."""
    execute(_REFUSE, {"id": row_id, "error": error})


# --- inbox ---------------------------------------------------------------------------------------


def record_message(execute: Execute, consumer: str, msg_id: str, now_ms: int) -> bool:
    """Record a message id; return False if it is recorded already.

    PostgreSQL waits for a concurrent transaction that records the same id, and returns False after its commit.
    """
    parameters = {"consumer": consumer, "msg_id": msg_id, "received_ms": now_ms}
    return bool(execute(_RECORD, parameters).changed)


def purge_messages(execute: Execute, before_ms: int, count: int) -> int:
    """Delete up to *count* of the ids that were recorded before a time; return their number."""
    return execute(_PURGE, {"before_ms": before_ms, "count": count}).changed
