"""File with the pending messages of a RocketMQ cluster, without their bodies: tables of SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.errors import BrokerError
from mqtemplate.message import MessageExt, Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingCounts, PendingMessage
from mqtemplate.topics import SCHEDULE_TOPIC

# --- the file -------------------------------------------------------------------------------------

_VERSION = 2
_CACHE_KIB = 32 << 10
_BUSY_S = 30.0
_MINUTE_MS = 60_000
_KEPT_MS = 600_000
"""Time for which a message stays in the file after it was due: its delete marker may come late."""
_MOST_DELETED = 5_000

_TABLES = """
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS sources (
  broker INTEGER, topic TEXT, queue INTEGER, next_offset INTEGER, physical_offset INTEGER, stored_ms INTEGER,
  PRIMARY KEY (broker, topic, queue)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pending (
  id INTEGER PRIMARY KEY, due_ms INTEGER, broker INTEGER, msg_id TEXT, level INTEGER, topic INTEGER, tag TEXT,
  keys TEXT, rolls INTEGER, born_ms INTEGER, stored_ms INTEGER, size INTEGER, physical_offset INTEGER,
  pending_key TEXT);
CREATE UNIQUE INDEX IF NOT EXISTS pending_due ON pending (due_ms, broker, msg_id, level);
CREATE INDEX IF NOT EXISTS pending_topic ON pending (topic, due_ms);
CREATE INDEX IF NOT EXISTS pending_tag ON pending (tag, due_ms) WHERE tag IS NOT NULL;
CREATE TABLE IF NOT EXISTS marks (
  due_ms INTEGER, broker INTEGER, msg_id TEXT, PRIMARY KEY (due_ms, broker, msg_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (
  minute INTEGER, topic INTEGER, level INTEGER, count INTEGER, PRIMARY KEY (minute, topic, level)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS pending_added AFTER INSERT ON pending BEGIN
  INSERT INTO counts VALUES (NEW.due_ms / 60000, NEW.topic, NEW.level, 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER IF NOT EXISTS pending_removed AFTER DELETE ON pending BEGIN
  UPDATE counts SET count = count - 1
    WHERE minute = OLD.due_ms / 60000 AND topic = OLD.topic AND level = OLD.level;
END;
"""

_NO_TABLES = "".join(f"DROP TABLE IF EXISTS {name};" for name in ("names", "sources", "pending", "marks", "counts"))

_COLUMNS = (
    "due_ms, (SELECT name FROM names WHERE id = broker), msg_id, level, (SELECT name FROM names WHERE id = topic), "
    "tag, keys, rolls, born_ms, stored_ms, size, physical_offset, pending_key"
)


class IndexedSource(NamedTuple):
    """A queue of a system topic. Its records are read in their order."""

    broker_name: str
    topic: str
    queue_id: int


class IndexPosition(NamedTuple):
    """Progress in a source.

    Attributes:
        next_offset: Queue offset of the next record to read.
        physical_offset: Physical offset of the last record, by which another store under the old name is noticed.
        stored_ms: Store time of the last record.
    """

    next_offset: int
    physical_offset: int = -1
    stored_ms: int = 0


class IndexedMessage(NamedTuple):
    """A pending message in the file. The topic is that of the wire."""

    due_ms: int
    broker_name: str
    msg_id: str
    level: int
    topic: str
    tag: str | None
    keys: str | None
    rolls: int
    born_ms: int
    stored_ms: int
    size: int
    physical_offset: int
    pending_key: str | None = None

    @classmethod
    def of(cls, record: MessageExt, due_ms: int) -> IndexedMessage:
        """Return what the file keeps of a record."""
        return cls(
            due_ms,
            record.broker_name,
            record.msg_id,
            record.queue_id + 1 if record.topic == SCHEDULE_TOPIC else 0,
            record.properties.get(Property.REAL_TOPIC, ""),
            record.tags,
            record.keys,
            parse_number(record.properties.get(Property.TIMER_ROLL_TIMES)) or 0,
            record.born_timestamp,
            record.store_timestamp,
            len(record.body),
            record.physical_offset,
            record.properties.get(Property.PENDING_KEY),
        )

    def message(self, unwrap: Callable[[str], str]) -> PendingMessage:
        """Return the message for a reader, with its handle."""
        if self.level:
            handle = RecallHandle(self.topic, self.broker_name, self.due_ms, self.msg_id, self.physical_offset)
        else:  # the broker rounds the time down to the slot again
            handle = RecallHandle(self.topic, self.broker_name, self.due_ms + 1, self.msg_id)
        return PendingMessage(
            topic=unwrap(self.topic),
            msg_id=self.msg_id,
            tags=self.tag,
            keys=self.keys,
            deliver_ms=self.due_ms,
            delay_level=self.level,
            roll_count=self.rolls,
            born_timestamp=self.born_ms,
            store_timestamp=self.stored_ms,
            body_size=self.size,
            handle=encode_handle(handle),
            pending_key=self.pending_key,
        )


@dataclass(frozen=True, slots=True)
class IndexFilter:
    """Conditions of a query on the file.

    Attributes:
        topics: Topics on the wire; None for all.
        after_ms: Due at this time or later.
        before_ms: Due before this time; None for no end.
    """

    topics: Sequence[str] | None
    tag: str | None
    after_ms: int
    before_ms: int | None

    def where(self, topic_ids: Sequence[int] | None) -> tuple[str, str, list[object]]:
        """Return the index to use, the conditions, and their values."""
        conditions, values = ["due_ms >= ?"], list[object]([self.after_ms])
        if self.before_ms is not None:
            conditions.append("due_ms < ?")
            values.append(self.before_ms)
        if topic_ids is not None:
            conditions.append(f"topic IN ({', '.join(map(str, topic_ids))})")
        if self.tag is not None:
            conditions.append("tag = ?")
            values.append(self.tag)
        is_of_one_topic = topic_ids is not None and len(topic_ids) == 1
        name = "pending_tag" if self.tag is not None else "pending_topic" if is_of_one_topic else "pending_due"
        return f"pending INDEXED BY {name}", " AND ".join(conditions), values


class PendingIndex:
    """The file. Several processes may use it at the same time; each record is added once.

    - A row is a message that was pending when its record was read, and that no delete marker has deleted.
    - ``counts`` has the number of rows by minute, topic and level; triggers keep it.
    - Memory is bounded by the page cache of SQLite. The file may be deleted at any time: it is built again.

    It is opened at its first use; the methods raise `BrokerError` if that fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, int] = {}
        self._is_created = False

    def _prepare(self) -> None:
        with self._errors():
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it has keys and topics of others' messages
            with closing(self._connect()) as db:
                db.execute("PRAGMA journal_mode = WAL")
                self._create(db)
        self._is_created = True

    def _create(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= _VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}, this program reads {_VERSION}")
        if version < _VERSION:  # the tables of an older version are read again from the brokers
            db.executescript(f"BEGIN IMMEDIATE; {_NO_TABLES} {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise BrokerError(
                f"the index of pending messages {self.path} cannot be used: {exc}; delete it, and it is built again, "
                "or name another file: mqtemplate.cluster.pending-index"
            ) from exc

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self._is_created:
            self._prepare()
        with self._errors(), closing(self._connect()) as db:
            yield db

    @property
    def size(self) -> int:
        """Bytes of the file, and of the log of changes beside it."""
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{self.path.name}*"))

    # --- reading -------------------------------------------------------------------------------

    def page(self, query: IndexFilter, after: tuple[int, str, str], max_count: int) -> list[IndexedMessage]:
        """Return the first messages after a position, by due time."""
        with self._open() as db:
            topic_ids = self._topic_ids(db, query.topics)
            source, where, values = query.where(topic_ids)
            if after[0]:
                where += " AND due_ms >= ? AND (due_ms, broker, msg_id) > (?, ?, ?)"
                values += [after[0], after[0], self._known(db, after[1]) or 0, after[2]]
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM {source} WHERE {where} ORDER BY due_ms, broker, msg_id LIMIT ?",
                [*values, max_count],
            )
            return [IndexedMessage._make(row) for row in rows]

    def counts(self, query: IndexFilter, bucket_ms: int) -> PendingCounts:
        """Return the numbers of messages; of whole minutes they are known, other spans are counted."""
        with self._open() as db:
            found: Counter[int] = Counter()
            first = -(-query.after_ms // _MINUTE_MS)
            end = (1 << 62) if query.before_ms is None else query.before_ms // _MINUTE_MS
            if query.tag is not None or bucket_ms % _MINUTE_MS or first >= end:
                found.update(self._counted(db, query, query.after_ms, query.before_ms, bucket_ms))
            else:
                found.update(self._counted(db, query, query.after_ms, first * _MINUTE_MS, bucket_ms))
                found.update(self._known_counts(db, query, first, end, bucket_ms))
                if query.before_ms is not None:
                    found.update(self._counted(db, query, end * _MINUTE_MS, query.before_ms, bucket_ms))
        return PendingCounts(found.total(), dict(sorted(found.items())))

    def _counted(
        self, db: sqlite3.Connection, query: IndexFilter, start_ms: int, end_ms: int | None, bucket_ms: int
    ) -> dict[int, int]:
        if end_ms is not None and end_ms <= start_ms:
            return {}
        part = IndexFilter(query.topics, query.tag, start_ms, end_ms)
        source, where, values = part.where(self._topic_ids(db, query.topics))
        statement = f"SELECT due_ms / ? * ?, count(*) FROM {source} WHERE {where} GROUP BY 1"
        return dict(db.execute(statement, [bucket_ms, bucket_ms, *values]).fetchall())

    def _known_counts(
        self, db: sqlite3.Connection, query: IndexFilter, first: int, end: int, bucket_ms: int
    ) -> dict[int, int]:
        topic_ids = self._topic_ids(db, query.topics)
        of_topics = "" if topic_ids is None else f" AND topic IN ({', '.join(map(str, topic_ids))})"
        minutes = bucket_ms // _MINUTE_MS
        rows = db.execute(
            "SELECT minute / ? * ?, sum(count) FROM counts WHERE minute >= ? AND minute < ? AND count > 0"
            f"{of_topics} GROUP BY 1",
            (minutes, bucket_ms, first, end),
        )
        return dict(rows.fetchall())

    def totals(self, now_ms: int, column: str) -> dict[str, int]:
        """Return the numbers of pending messages by ``topic`` or by ``level``, to the minute."""
        names = {"topic": "(SELECT name FROM names WHERE id = topic)", "level": "level"}
        statement = f"SELECT {names[column]}, sum(count) FROM counts WHERE minute >= ? GROUP BY {column}"
        with self._open() as db:
            rows = db.execute(statement, (now_ms // _MINUTE_MS,)).fetchall()
        return {str(name): count for name, count in sorted(rows, key=lambda row: -row[1]) if count}

    def _topic_ids(self, db: sqlite3.Connection, topics: Sequence[str] | None) -> list[int] | None:
        if topics is None:
            return None
        return [found for name in topics if (found := self._known(db, name)) is not None] or [0]

    def _known(self, db: sqlite3.Connection, name: str) -> int | None:
        if name not in self._names:
            row = db.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
            if row is None:
                return None
            self._names[name] = row[0]
        return self._names[name]

    def topics(self) -> list[str]:
        """Return all topics of pending messages, as on the wire."""
        with self._open() as db:
            rows = db.execute("SELECT name FROM names WHERE id IN (SELECT DISTINCT topic FROM counts WHERE count > 0)")
            return [name for (name,) in rows.fetchall()]

    # --- writing -------------------------------------------------------------------------------

    def position(self, source: IndexedSource) -> IndexPosition | None:
        """Return how far a source was read; None if it never was."""
        with self._open() as db:
            return self._position(db, source)

    def _position(self, db: sqlite3.Connection, source: IndexedSource) -> IndexPosition | None:
        row = db.execute(
            "SELECT next_offset, physical_offset, stored_ms FROM sources JOIN names ON names.id = sources.broker "
            "WHERE name = ? AND topic = ? AND queue = ?",
            source,
        ).fetchone()
        return None if row is None else IndexPosition._make(row)

    def add(
        self,
        source: IndexedSource,
        before: IndexPosition | None,
        after: IndexPosition,
        messages: Sequence[IndexedMessage],
        marks: Sequence[tuple[int, str]] = (),
    ) -> bool:
        """Add the records of a source from *before* to *after*; return False if another process was first.

        Args:
            marks: Due time and message id of each timer that a marker deletes.
        """
        with self._writing() as db:
            if self._position(db, source) != before:
                return False
            broker = self._id(db, source.broker_name)
            db.executemany("INSERT OR IGNORE INTO marks VALUES (?, ?, ?)", [(due, broker, name) for due, name in marks])
            db.executemany(
                "DELETE FROM pending WHERE due_ms = ? AND broker = ? AND msg_id = ? AND level = 0",
                [(due, broker, name) for due, name in marks],
            )
            rows = [
                (
                    each[0],
                    broker,
                    each[2],
                    each[3],
                    self._id(db, each.topic),
                    *each[5:],
                    each[0],
                    broker,
                    each[2],
                    each[3],
                )
                for each in messages
            ]
            # A timer beyond the window of the wheel is stored again; the newest record counts.
            db.executemany(
                "INSERT INTO pending (due_ms, broker, msg_id, level, topic, tag, keys, rolls, born_ms, stored_ms, "
                "size, physical_offset, pending_key) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS "
                "(SELECT 1 FROM marks WHERE due_ms = ? AND broker = ? AND msg_id = ? AND 0 = ?) "
                "ON CONFLICT (due_ms, broker, msg_id, level) DO UPDATE SET rolls = excluded.rolls, "
                "stored_ms = excluded.stored_ms, physical_offset = excluded.physical_offset "
                "WHERE excluded.physical_offset >= pending.physical_offset",
                rows,
            )
            db.execute(
                "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?, ?)",
                (broker, source.topic, source.queue_id, *after),
            )
        return True

    def remove_broker(self, broker_name: str) -> None:
        """Forget a broker that has another store now."""
        with self._writing() as db:
            broker = self._id(db, broker_name)
            for table in ("pending", "marks", "sources"):
                db.execute(f"DELETE FROM {table} WHERE broker = ?", (broker,))

    def remove_due(self, now_ms: int) -> None:
        """Remove what was due some minutes ago."""
        while True:
            with self._writing() as db:
                statement = (
                    "DELETE FROM pending WHERE id IN (SELECT id FROM pending INDEXED BY pending_due WHERE due_ms < ? "
                    "LIMIT ?)"
                )
                count = db.execute(statement, (now_ms - _KEPT_MS, _MOST_DELETED)).rowcount
                if count < _MOST_DELETED:
                    db.execute("DELETE FROM marks WHERE due_ms < ?", (now_ms - _KEPT_MS,))
                    db.execute("DELETE FROM counts WHERE minute < ?", ((now_ms - 2 * _KEPT_MS) // _MINUTE_MS,))
                    return

    def _id(self, db: sqlite3.Connection, name: str) -> int:
        found = self._known(db, name)
        if found is None:
            db.execute("INSERT OR IGNORE INTO names (name) VALUES (?)", (name,))
            found = self._known(db, name)
        assert found is not None
        return found

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                self._names.clear()  # a name may have got an id in this transaction
                raise
            db.execute("COMMIT")
