"""Marks of dead letters: which ones were sent again or purged.

RocketMQ's log is append-only, so a message of a dead-letter topic cannot be changed or removed. A mark is a message in
a topic of its own. Retention deletes a mark later than the dead letters that it names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.dead_letters.letter import LetterState
from mqtemplate.admin.messages import read_queue
from mqtemplate.errors import UnknownNameError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.topics import MARKS_TOPIC

_log = LimitedLog(get_logger("mqtemplate.admin"), lambda: int(time.monotonic() * 1_000))

_IDS_IN_MARK = 500


@dataclass(frozen=True, slots=True)
class Mark:
    """The last thing that was done with a dead letter, and when (epoch ms)."""

    state: LetterState
    time_ms: int


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one broker or cluster."""

    admin: BrokerAdmin

    def of(self, group: str) -> dict[str, Mark]:
        """Return the marks of the dead letters of *group*, by the ids of the dead letters."""
        try:
            spans = self.admin.queue_spans(MARKS_TOPIC)
        except UnknownNameError:
            return {}
        marks: dict[str, Mark] = {}
        for span in spans:
            for message in read_queue(self.admin.broker, span.queue, span.min_offset, span.max_offset):
                if message.keys == group:
                    state, ids = _read(message)
                    added = Mark(state, message.store_timestamp)
                    for letter_id in ids:
                        if letter_id not in marks or marks[letter_id].time_ms <= added.time_ms:
                            marks[letter_id] = added
        return marks

    def add(self, group: str, state: LetterState, ids: Sequence[str]) -> None:
        """Mark dead letters of *group*."""
        if not ids:
            return
        broker = self.admin.open_for_changes()
        broker.create_topic(MARKS_TOPIC, 1)
        for some in _batches(ids):
            body = json.dumps({"state": state.value, "ids": some}).encode()
            broker.send(Message(MARKS_TOPIC, body, {Property.KEYS: group, Property.TAGS: state.value}))


def _read(message: MessageExt) -> tuple[LetterState, list[str]]:
    """Return the state and the ids of a mark; no ids for a message of another program, which is logged."""
    try:
        mark = json.loads(message.body)
        state, ids = LetterState(mark["state"]), mark["ids"]
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise TypeError(f"ids must be a list of texts, got {ids!r:.64}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("dead_letters.mark_ignored", topic=message.topic, msg_id=message.msg_id, reason=repr(error))
        return LetterState.OPEN, []
    return state, ids


def _batches(ids: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(ids)
    while some := list(islice(rest, _IDS_IN_MARK)):
        yield some
