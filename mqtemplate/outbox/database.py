"""The three tables and every statement on them, for SQLite and PostgreSQL.

Parameters are written ``:name``; an integration translates them. The integrations declare the tables in their own way:
`mqtemplate.outbox.sqlalchemy` as ``Table``, `mqtemplate.outbox.django` as models. All use these names::

    mqtemplate_outbox        id, msg_id, topic, hash_key, properties, body, created_ms, error, change_key
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
KEY_LENGTH = 255
"""Longest key of a change, in characters: an index of PostgreSQL takes some 2,700 bytes."""

_DELIVER_MS = "deliver_ms"
_MOST_PARAMETERS = 500  # older versions of SQLite take 999

_LONGEST_LEASE = 10
"""A lease that is longer than this many times the lease of this process was set by a clock that was ahead."""
_CLOCK_SKEW_MS = 60_000

_ADD = (
    f"INSERT INTO {OUTBOX} (msg_id, topic, hash_key, properties, body, created_ms) "
    "VALUES (:msg_id, :topic, :hash_key, :properties, :body, :created_ms)"
)
_ADD_CHANGE = (
    f"INSERT INTO {OUTBOX} (msg_id, topic, properties, body, created_ms, change_key) "
    "VALUES ('', :topic, :properties, :body, :created_ms, :change_key)"
)
_COLUMNS = "id, msg_id, topic, hash_key, properties, body, change_key"
_READ = f"SELECT {_COLUMNS} FROM {OUTBOX} WHERE error IS NULL ORDER BY id LIMIT :count"
# It reads the whole table, as there is no index of the keys: an index would cost each send. The table is short while
# the broker is up; while it is down, the broker is waited for longer than the table.
_SEARCH = (
    f"SELECT {_COLUMNS} FROM {OUTBOX} WHERE (error IS NULL OR error LIKE :waits) AND change_key IS NULL "
    "AND (msg_id = :name OR properties LIKE :pattern ESCAPE '!') ORDER BY id"
)
_HAS_CHANGES = f"SELECT 1 FROM {OUTBOX} WHERE change_key IS NOT NULL AND error IS NULL AND id > :after_id LIMIT 1"
_OLD_COLUMN = f"SELECT id FROM {OUTBOX} WHERE id < 0"
_NEW_COLUMN = f"SELECT change_key FROM {OUTBOX} WHERE id < 0"
_SEARCH_WAITING = f"{_SEARCH.partition(' ORDER')[0]} AND error IS NOT NULL AND id < :before_id ORDER BY id"
_FIRST_WAITING = f"SELECT MIN(id) FROM {OUTBOX} WHERE error LIKE :waits"
_REVIVE = f"UPDATE {OUTBOX} SET error = NULL WHERE error LIKE :waits AND id <= :last_id"
_MOVE = f"UPDATE {OUTBOX} SET properties = :properties WHERE id = :id"
_WAITS = "waits: "
_WAITING = f"{_WAITS}%"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxChange:
    """One row that cancels or reschedules the messages before it: those in the table, and those at the broker.

    Attributes:
        id: Position in the order of the table; 0 for a row that is not stored yet.
        key: A business key or a message id.
        topic: Only messages for this topic; None for all.
        deliver_ms: The new deliver time (epoch ms); None for a cancel.
    """

    id: int = 0
    key: str
    topic: str | None = None
    deliver_ms: int | None = None


OutboxEntry: TypeAlias = OutboxRow | OutboxChange
"""One row of the outbox."""


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


def add_change(execute: Execute, change: OutboxChange, now_ms: int) -> None:
    """Add a change at the end of the outbox."""
    properties = {} if change.deliver_ms is None else {_DELIVER_MS: change.deliver_ms}
    execute(
        _ADD_CHANGE,
        {
            "topic": change.topic or "",
            "properties": json.dumps(properties),
            "body": b"",
            "created_ms": now_ms,
            "change_key": change.key,
        },
    )


def read_rows(execute: Execute, count: int) -> list[OutboxEntry]:
    """Return the first rows that are to be relayed."""
    return [_entry(*row) for row in execute(_READ, {"count": count}).rows]


def search_rows(execute: Execute, name: str) -> list[OutboxRow]:
    """Return the messages whose id is *name*, or whose properties contain it; the caller checks which are meant."""
    return _messages(execute(_SEARCH, _search(name)))


def _search(name: str) -> dict[str, Any]:
    text = json.dumps(name)[1:-1]  # as in the column
    for wildcard in "!%_":
        text = text.replace(wildcard, f"!{wildcard}")
    return {"name": name, "pattern": f"%{text}%", "waits": _WAITING}


def _messages(found: Result) -> list[OutboxRow]:
    return [entry for entry in (_entry(*row) for row in found.rows) if isinstance(entry, OutboxRow)]


def has_changes(execute: Execute, after_id: int) -> bool:
    """Return True if there are changes in the table after a position."""
    return bool(execute(_HAS_CHANGES, {"after_id": after_id}).rows)


def read_changes(execute: Execute, keys: Iterable[str], after_id: int) -> list[OutboxChange]:
    """Return the changes of messages with these keys or ids that are in the table after a position."""
    wanted, changes = sorted(set(keys)), []
    for start in range(0, len(wanted), _MOST_PARAMETERS):
        places, parameters = _list("key", wanted[start : start + _MOST_PARAMETERS])
        statement = f"SELECT {_COLUMNS} FROM {OUTBOX} WHERE error IS NULL AND id > :after_id AND change_key IN {places}"
        found = execute(statement, {"after_id": after_id, **parameters}).rows
        changes += [entry for entry in (_entry(*row) for row in found) if isinstance(entry, OutboxChange)]
    return changes


def _entry(
    id_: int, msg_id: str, topic: str, hash_key: str | None, properties: str, body: Any, change_key: str | None
) -> OutboxEntry:
    if change_key is not None:
        return OutboxChange(
            id=id_, key=change_key, topic=topic or None, deliver_ms=json.loads(properties).get(_DELIVER_MS)
        )
    return OutboxRow(id=id_, msg_id=msg_id, topic=topic, hash_key=hash_key, properties=properties, body=bytes(body))


def _list(name: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return a list for ``IN`` with its parameters."""
    names = [f"{name}{index}" for index in range(len(values))]
    return f"({', '.join(f':{each}' for each in names)})", dict(zip(names, values, strict=True))


def check_columns(execute: Execute) -> None:
    """Raise an error if the table was created by an older version, which had no changes.

    Raises:
        ConfigurationError: A column is missing.
        Exception: The error of the driver, if the table does not exist or the database is down.
    """
    execute(_OLD_COLUMN, {})
    try:
        execute(_NEW_COLUMN, {})
    except Exception as exc:  # each driver has errors of its own
        raise ConfigurationError(
            f"table {OUTBOX} has no column change_key, since an older version created it; upgrade it with Alembic or "
            f"'manage.py migrate', or execute 'ALTER TABLE {OUTBOX} ADD COLUMN change_key VARCHAR({KEY_LENGTH})'"
        ) from exc


def take_lease(execute: Execute, owner: str, now_ms: int, until_ms: int) -> bool:
    """Take or extend the right to relay; return False if another process has it.

    A process whose clock was ahead may have left a lease that ends in years. So one that is far longer than the
    lease of this process does not count.
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
    """Delete rows that were relayed."""
    if ids:
        places, parameters = _list("id", ids)
        execute(f"DELETE FROM {OUTBOX} WHERE id IN {places}", parameters)


def refuse_row(execute: Execute, row_id: int, error: str) -> None:
    """Keep a row that cannot be relayed, with the reason; it is not tried again."""
    execute(_REFUSE, {"id": row_id, "error": error})


# --- rows that wait ------------------------------------------------------------------------------


def let_wait(execute: Execute, row_id: int, reason: str) -> None:
    """Keep a row that cannot be relayed now, with the reason. `revive` lets it be tried again."""
    execute(_REFUSE, {"id": row_id, "error": f"{_WAITS}{reason}"})


def first_waiting(execute: Execute) -> int | None:
    """Return the id of the first row that waits; None if none does."""
    [[found]] = execute(_FIRST_WAITING, {"waits": _WAITING}).rows
    return None if found is None else int(found)


def revive(execute: Execute, last_id: int) -> None:
    """Let the rows that wait be tried again, those up to an id."""
    execute(_REVIVE, {"waits": _WAITING, "last_id": last_id})


def search_waiting(execute: Execute, name: str, before_id: int) -> list[OutboxRow]:
    """Return the messages that wait, are before a position, and have the id or perhaps the key *name*."""
    return _messages(execute(_SEARCH_WAITING, {**_search(name), "before_id": before_id}))


def move_row(execute: Execute, row: OutboxRow) -> None:
    """Store other properties of a message."""
    execute(_MOVE, {"id": row.id, "properties": row.properties})


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
