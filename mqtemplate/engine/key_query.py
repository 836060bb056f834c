"""Queries for messages by key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from mqtemplate.errors import MessageError
from mqtemplate.message import MessageExt, key_text, offset_msg_id, split_keys
from mqtemplate.numbers import LONG_MAX
from mqtemplate.record.codec import StoredRecord, unpack_host
from mqtemplate.record.properties import KEYS, UNIQ_KEY, find_property


@dataclass(frozen=True, slots=True)
class KeyQuery:
    """The arguments of `Broker.messages_by_key`.

    Raises:
        MessageError: *key* is empty or more than one word, or *max_count* is below 1.
    """

    topic: str
    key: str
    max_count: int
    begin_ms: int
    end_ms: int | None
    unique: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_text(self.key))
        if self.max_count < 1:
            raise MessageError(f"max_count must be 1 or more, got {self.max_count}")

    @property
    def last_ms(self) -> int:
        """Largest store timestamp that matches."""
        return LONG_MAX if self.end_ms is None else self.end_ms

    def matches(self, message: MessageExt) -> bool:
        """Return True if *message* matches. An index stores hash codes only, so it also finds other messages."""
        if message.topic != self.topic or not self.begin_ms <= message.store_timestamp <= self.last_ms:
            return False
        return message.msg_id == self.key if self.unique else self.key in split_keys(message.keys)

    def matches_record(self, record: StoredRecord) -> bool:
        """Return True if the message in *record* matches. Its body is not decompressed, and not looked at."""
        if record.topic != self.topic or not self.begin_ms <= record.store_timestamp <= self.last_ms:
            return False
        if not self.unique:
            return self.key in split_keys(find_property(record.properties_bytes, KEYS))
        msg_id = find_property(record.properties_bytes, UNIQ_KEY)
        return self.key == (msg_id or offset_msg_id(unpack_host(record.store_host), record.physical_offset))

    def merge(self, messages: Iterable[MessageExt]) -> list[MessageExt]:
        """Return the messages of several brokers that match: each once, the newest first, at most *max_count*."""
        found = {(each.broker_name, each.physical_offset): each for each in messages if self.matches(each)}
        newest_first = sorted(found.values(), key=attrgetter("store_timestamp", "physical_offset"), reverse=True)
        return newest_first[: self.max_count]
