"""Messages that retention keeps although they are old: unread ones of known groups, and dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mqtemplate.broker import BrokerLifecycle, ConsumeFromWhere, RetentionHold
from mqtemplate.engine.group_activity import GroupActivity, GroupMembers, GroupTopic
from mqtemplate.engine.groups import LocalGroups
from mqtemplate.engine.reader import QueueReader
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.store.cleaning import UnreadSpan
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import DLQ_TOPIC_PREFIX, HAND_OVER_GROUP, RETRY_TOPIC_PREFIX, is_system_group

_log = get_logger("mqtemplate.broker")

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, eq=False)
class ProtectedMessages:
    """The messages for which the cleaning of the store keeps files. Implements `UnreadMessages`.

    These are the messages after the committed offsets of all known groups, and the dead letters that are not old. A
    group is known if it has committed an offset or has a member now; see `GroupActivity` for groups that are gone.
    RocketMQ's own groups and broadcasting groups do not count. Delayed messages have rules of their own.

    A call reads one consume queue unit for each queue with unread messages, so it costs nothing for groups that have
    consumed everything. Nothing happens when a message is stored or consumed.
    """

    _store: MessageStore
    _reader: QueueReader
    _offsets: ConsumerOffsets
    _members: GroupMembers
    _activity: GroupActivity
    _broker_name: str

    def before(self, physical_end: int) -> list[UnreadSpan]:
        """See `UnreadMessages.before`."""
        queue_ids = self._store.queue_ids_by_topic()
        ends: dict[tuple[str, int], int] = {}
        found: dict[GroupTopic, UnreadSpan] = {}
        for group, topic, queue_id, start in self._starts(queue_ids):
            queue = self._store.consume_queue(topic, queue_id)
            if start >= queue.max_offset:
                continue
            at = max(start, queue.min_offset)
            end = ends.get((topic, queue_id))
            if end is None:
                end = ends[topic, queue_id] = queue.end_before(physical_end)
            if at >= end:
                continue
            try:
                first = queue.unit(at).physical_offset
            except IndexError:  # deleted meanwhile
                continue
            other = found.get((group, topic))
            count = end - at + (0 if other is None else other.message_count)
            first = first if other is None else min(first, other.physical_offset)
            found[group, topic] = UnreadSpan(group, topic, count, first)
        return [found[key] for key in sorted(found)]

    def holds(self) -> list[RetentionHold]:
        """Return what keeps files that are older than ``file-reserved-time``."""
        files = self._store.expired_files()
        if not files:
            return []
        reserved_ms, end = self._store.settings.file_reserved_time * _HOUR_MS, files[-1].end
        holds = []
        for span in self.before(end):
            kept = [file for file in files if file.end > span.physical_offset]
            since_ms = (kept[0].newest_ms or 0) + reserved_ms
            size = end - kept[0].start
            holds.append(RetentionHold(span.group, span.topic, span.message_count, since_ms, size))
        return holds

    # --- where the unread messages of a queue start --------------------------------------------

    def _starts(self, queue_ids: dict[str, list[int]]) -> Iterator[tuple[str, str, int, int]]:
        """Yield group, topic, queue id, and the first queue offset that is needed."""
        yield from self._dead_letters(queue_ids)
        broadcasting, subscribed = self._members.broadcasting(), self._members.subscribed()
        members = {(group, queue): at for group, queue, at in self._members.local.starts()}
        first_of = {info.group: info.consume_from_where for info in self._members.remote()}
        committed = self._offsets.all()
        for group, topic in committed.keys() | subscribed:
            is_hand_over = group == HAND_OVER_GROUP  # no client is its member
            is_kept = is_hand_over or (group, topic) in subscribed or not self._activity.is_gone(group, topic)
            if group in broadcasting or (is_system_group(group) and not is_hand_over) or not is_kept:
                continue
            offsets = committed.get((group, topic), {})
            for queue_id in queue_ids.get(topic, ()):
                start = offsets.get(queue_id)
                if start is None:
                    queue = MessageQueue(topic, self._broker_name, queue_id)
                    start = members.get((group, queue))
                    start = self._first_position(queue, first_of.get(group)) if start is None else start
                yield group, topic, queue_id, start

    def _first_position(self, queue: MessageQueue, consume_from_where: str | None) -> int:
        """Return where a group without a committed offset in this queue would start."""
        is_last = consume_from_where in (None, ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET.value)
        if is_last and not queue.topic.startswith(RETRY_TOPIC_PREFIX) and not self._reader.is_young(queue):
            return self._reader.max_offset(queue)
        # A remote client knows the time of CONSUME_FROM_TIMESTAMP, the broker does not.
        return self._reader.min_offset(queue)

    def _dead_letters(self, queue_ids: dict[str, list[int]]) -> Iterator[tuple[str, str, int, int]]:
        reserved_ms = self._store.settings.dead_letter_reserved_time * _HOUR_MS
        since_ms = self._store.clock.now_ms() - reserved_ms
        for topic, ids in queue_ids.items() if reserved_ms else ():
            if topic.startswith(DLQ_TOPIC_PREFIX):
                group = topic.removeprefix(DLQ_TOPIC_PREFIX)
                for queue_id in ids:
                    # Stored before *since_ms* is old; in the same millisecond as well, as a file of that age is.
                    queue = MessageQueue(topic, self._broker_name, queue_id)
                    yield group, topic, queue_id, self._reader.search_offset(queue, since_ms + 1)


class Retention:
    """The part of the engine that keeps unread messages: the groups, and the messages that are kept for them.

    With ``keep_unread_messages=False`` it keeps nothing.

    Attributes:
        members: The members of all groups.
        activity: Service that notes for how long groups have been away.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: EmbeddedSettings,
        reader: QueueReader,
        offsets: ConsumerOffsets,
        local_groups: LocalGroups,
        lifecycle: BrokerLifecycle,
    ) -> None:
        self._is_on = settings.keep_unread_messages
        self._lifecycle = lifecycle
        self.members = members = GroupMembers(local_groups)
        reserved_hours = settings.group_reserved_time if self._is_on else None
        self.activity = GroupActivity(store.store_files, store.clock, offsets, members, reserved_hours)
        self._protected = ProtectedMessages(store, reader, offsets, members, self.activity, settings.broker_name)
        if self._is_on:
            store.cleaning.keep(self._protected)
        store.metrics.add_collector(self._samples)

    def holds(self) -> list[RetentionHold]:
        """Return what keeps files that are older than ``file-reserved-time``."""
        return self._protected.holds() if self._is_on and self._lifecycle.is_open else []

    def _samples(self) -> Iterator[MetricSample]:
        """Yield ``store.retention_held``: the bytes that each group keeps."""
        sizes: dict[str, int] = {}
        for hold in self.holds():
            sizes[hold.group] = max(sizes.get(hold.group, 0), hold.byte_count)
        for group, size in sizes.items():
            yield MetricSample("store.retention_held", MetricKind.GAUGE, size, {"group": group})

    def close(self) -> None:
        """Note which groups are active, while they still have their members."""
        try:
            self.activity.check()
        except StoreError as exc:  # groups count as active for longer
            _log.warning("broker.group_activity_not_saved", reason=str(exc))
