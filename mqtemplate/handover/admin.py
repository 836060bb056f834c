"""Topics, groups and offsets of the two brokers of a hand-over, for operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mqtemplate.broker import (
    MAX_IN_FLIGHT_SHOWN,
    Broker,
    BrokerAdmin,
    GroupDeliveries,
    GroupInfo,
    QueueProgress,
    QueueSpan,
    TopicKind,
    TopicSettings,
    unknown_name,
)
from mqtemplate.errors import UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.handover.old_broker import inner_queue, is_old, shown_queue
from mqtemplate.message import MessageQueue

_log = get_logger("mqtemplate.handover")
_T = TypeVar("_T")


class HandOverAdmin(BrokerAdmin):
    """Topics, groups and offsets of both brokers. Queues of the old one have its name with ``old:``."""

    def __init__(self, old: Broker, new: Broker) -> None:
        self._old, self._new = old.admin(), new.admin()

    def topic_kinds(self) -> dict[str, TopicKind]:
        kinds = self._old.topic_kinds() | self._new.topic_kinds()
        return dict(sorted(kinds.items()))

    def delay_levels_ms(self) -> Sequence[int] | None:
        return self._new.delay_levels_ms() or None

    def topic_shapes(self) -> Mapping[str, str]:
        """Return the shapes of the new broker, and the old one's for what has none there."""
        return {**self._old.topic_shapes(), **self._new.topic_shapes()}

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        nothing: list[QueueSpan] = []
        old = _if_known(lambda: self._old.queue_spans(topic), nothing)
        new = _if_known(lambda: self._new.queue_spans(topic), nothing)
        if not old and not new:
            raise unknown_name("topic", topic, self.topic_names())
        return sorted([*new, *(replace(span, queue=shown_queue(span.queue)) for span in old)], key=_queue)

    def groups_of(self, topic: str) -> list[str]:
        return sorted({*self._old.groups_of(topic), *self._new.groups_of(topic)})

    def delete_topic(self, topic: str) -> None:
        """Delete a topic at both brokers.

        Raises:
            UnknownNameError: Neither has it.
        """
        if topic not in self.topic_kinds():
            raise unknown_name("topic", topic, self.topic_names())
        for admin in (self._old, self._new):
            with contextlib.suppress(UnknownNameError):
                admin.delete_topic(topic)

    # --- groups --------------------------------------------------------------------------------

    def group_names(self) -> list[str]:
        return sorted({*self._old.group_names(), *self._new.group_names()})

    def group(self, name: str) -> GroupInfo:
        old: GroupInfo | None = _if_known(lambda: self._old.group(name), None)
        new: GroupInfo | None = _if_known(lambda: self._new.group(name), None)
        if old is None and new is None:
            raise unknown_name("group", name, self.group_names())
        return _merged(old, new)

    def progress(self, group: str, topic: str | None = None) -> Sequence[QueueProgress]:
        return [each for each in self.group(group).progress if topic in (None, each.queue.topic)]

    def deliveries(self, group: str) -> GroupDeliveries | None:
        old, new = self._old.deliveries(group), self._new.deliveries(group)
        if old is None or new is None:
            return new if old is None else old
        messages = sorted([*old.messages, *new.messages], key=lambda each: each.since_ms)
        return GroupDeliveries(
            old.in_flight + new.in_flight,
            tuple(messages[:MAX_IN_FLIGHT_SHOWN]),
            old.waiting + new.waiting,
            _sum(old.expired, new.expired),
            _sum(old.held, new.held),
        )

    def create_group(self, name: str) -> None:
        """Create a group at the new broker."""
        self._new.create_group(name)
        _log.debug("hand_over.group_created", group=name)

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        old = {inner_queue(queue): offset for queue, offset in offsets.items() if is_old(queue.broker_name)}
        new = {queue: offset for queue, offset in offsets.items() if not is_old(queue.broker_name)}
        for admin, mine in ((self._old, old), (self._new, new)):
            if mine:
                admin.set_offsets(group, mine)

    def forget_group(self, group: str) -> None:
        for admin in (self._old, self._new):
            admin.forget_group(group)


def copy_topics(wanted: Mapping[str, TopicSettings], new: Broker, *, adds_queues: bool = True) -> list[str]:
    """Create topics at the new broker, with the queues and rights that they have at the old one. Return what changed.

    A topic that exists there keeps its rights. It gets the queues that it lacks.

    Args:
        adds_queues: False: a topic that exists keeps the number of its queues.

    Raises:
        UnsupportedError: The new broker does not tell its topics.
        BrokerError: It refuses.
    """
    admin = new.admin()
    existing, changed = admin.topic_settings(), []
    for name, settings in sorted(wanted.items()):
        found = existing.get(name)
        if found is None or (adds_queues and found.queue_count < settings.queue_count):
            new.create_topic(name, settings.queue_count)
            changed.append(name)
            _log.info("hand_over.topic_created", topic=name, queues=settings.queue_count)
        if found is None and not (settings.is_readable and settings.is_writable):
            admin.set_topic_rights(name, is_readable=settings.is_readable, is_writable=settings.is_writable)
    return changed


def _if_known(ask: Callable[[], _T], otherwise: _T) -> _T:
    """Return the answer of one broker; *otherwise* if it does not have the name."""
    try:
        return ask()
    except UnknownNameError:
        return otherwise


def _queue(span: QueueSpan) -> MessageQueue:
    return span.queue


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _merged(old: GroupInfo | None, new: GroupInfo | None) -> GroupInfo:
    """Return the state of a group at both brokers. What its members have set is the same at both."""
    old_progress = () if old is None else (replace(each, queue=shown_queue(each.queue)) for each in old.progress)
    latest = new if new is not None and (new.members or old is None) else old
    assert latest is not None
    members = {member.client_id: member for group in (old, new) if group is not None for member in group.members}
    subscriptions = {each for group in (old, new) if group is not None for each in group.subscriptions}
    return replace(
        latest,
        members=tuple(members[client_id] for client_id in sorted(members)),
        subscriptions=tuple(sorted(subscriptions, key=lambda each: each.topic)),
        progress=(*old_progress, *(() if new is None else new.progress)),
    )
