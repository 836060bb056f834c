"""Topics and groups that operators create and delete, and messages that they send: each with a preview."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from mqtemplate.broker import OffsetChange, QueueSpan, TopicKind, TopicMessageType
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import OldValue
from mqtemplate.operations.bulk import OnProgress
from mqtemplate.operations.changes import Change, ChangePreview, ChangeResult, offset_value
from mqtemplate.operations.offsets import OffsetPosition
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.topics import check_send_topic

MAX_QUEUES = 1_024
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
"""A group name is part of the names of its retry and dead letter topics. Source: ``TopicValidator``."""


def _application_topic(topic: str) -> str:
    """Return a name that a topic of an application may have.

    Raises:
        MessageError: It may not have it.
    """
    if TopicKind.of(check_send_topic(topic)) is not TopicKind.NORMAL:
        raise MessageError(
            f"topic {topic!r} is a {TopicKind.of(topic).value} topic, which the broker manages itself; give a topic "
            "of an application"
        )
    return topic


def _spans(access: BrokerAccess, topic: str) -> list[QueueSpan]:
    """Return the queues of a topic; none if it does not exist."""
    try:
        return access.admin.queue_spans(topic)
    except UnknownNameError:
        return []


# --- topics -------------------------------------------------------------------------------------


class TopicCreated(Change):
    """Creation of a topic, or more queues for one that exists.

    Args:
        queue_count: Number of its queues, on each broker of a cluster.
        message_type: Type of the messages of a new topic.
        target: Further fields of the audit log.

    Raises:
        MessageError: The name or the number is not allowed, the topic has as many queues already, or it exists and a
            type is given: producers would be refused.
    """

    def __init__(
        self,
        access: BrokerAccess,
        topic: str,
        queue_count: int,
        *,
        message_type: TopicMessageType | None = None,
        **target: object,
    ) -> None:
        if not 1 <= queue_count <= MAX_QUEUES:
            raise MessageError(f"a topic has 1 to {MAX_QUEUES:,} queues, got {queue_count}")
        by_broker: dict[str, int] = {}
        for span in _spans(access, _application_topic(topic)):
            by_broker[span.queue.broker_name] = by_broker.get(span.queue.broker_name, 0) + 1
        self._before = min(by_broker.values(), default=0)
        if self._before >= queue_count:
            raise MessageError(
                f"topic {topic!r} exists with {self._before} queues, and queues cannot be removed; give a larger number"
            )
        if self._before and message_type is not None:
            raise MessageError(
                f"topic {topic!r} exists, and another type would make proxies refuse what its producers send; leave "
                f"the type out, or change it: mqadmin updateTopic -t {topic} -a +message.type={message_type.value}"
            )
        fields: dict[str, object] = {"topic": topic, "queues": queue_count, "queues_before": self._before}
        if message_type is not None:
            fields["message_type"] = message_type.value
        super().__init__("topics.create", {**fields, **target}, is_named=True, can_be_undone=not self._before)
        self._access = access
        self._topic = topic
        self._queue_count = queue_count
        self._message_type = message_type

    @property
    def title(self) -> str:
        if self._before:
            return f"Give topic {self._topic!r} {self._queue_count} queues instead of {self._before}"
        of_type = f" for messages of type {self._message_type.value}" if self._message_type is not None else ""
        return f"Create topic {self._topic!r} with {self._queue_count} queue{'s' * (self._queue_count > 1)}{of_type}"

    @cached_property
    def preview(self) -> ChangePreview:
        undo = "Queues cannot be removed again." if self._before else "It can be undone: the topic is deleted again."
        notes = ("Consumers get other queues, and for a moment messages of one key may be in two.",)
        return ChangePreview(count=0, noun="message", has_effect=True, undo=undo, notes=notes if self._before else ())

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        broker = self._access.open_for_changes()
        broker.create_topic(self._topic, self._queue_count, message_type=self._message_type)
        return ChangeResult(f"topic {self._topic!r} has {self._queue_count} queues", {})


class TopicDeleted(Change):
    """Deletion of a topic, with the offsets of its groups.

    Args:
        target: Further fields of the audit log.

    Raises:
        UnknownNameError: There is no such topic.
        MessageError: The broker manages it itself.
    """

    is_by_queue: ClassVar[bool] = True

    def __init__(self, access: BrokerAccess, topic: str, **target: object) -> None:
        self._found = access.admin.topic(_application_topic(topic))
        queues = len({span.queue.queue_id for span in self._found.queues})
        super().__init__("topics.delete", {"topic": topic, "queues": queues, **target})
        self._access = access

    @property
    def title(self) -> str:
        return f"Delete topic {self._found.name!r} with {self.preview.amount}"

    @cached_property
    def preview(self) -> ChangePreview:
        found, notes = self._found, []
        members = [name for name in found.groups if self._access.admin.group(name).members]
        if members:
            notes.append(f"These groups have members now: {', '.join(members)}. They may create the topic again.")
        if found.groups:
            notes.append(f"These groups lose their offsets in it: {', '.join(found.groups)}.")
        return ChangePreview(
            count=found.message_count,
            noun="message",
            topics={found.name: found.message_count} if found.message_count else {},
            has_effect=True,
            notes=tuple(notes),
            undo="It can be undone: the topic is created again, with as many queues and without a message type. The "
            "offsets of its groups are gone then, and a RocketMQ broker of Apache has deleted the messages.",
        )

    def old_values(self) -> Iterator[OldValue]:
        """Yield the offsets of its groups: for a reader of the log."""
        for group in self._found.groups:
            for each in self._access.admin.progress(group, self._found.name):
                if each.committed is not None:
                    yield {"group": group, **offset_value(OffsetChange(each.queue, each.committed, 0)), "after": None}

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        self._access.open_for_changes().delete_topic(self._found.name)
        on_progress(self._found.message_count)
        return ChangeResult(f"deleted topic {self._found.name!r}", {})


# --- groups -------------------------------------------------------------------------------------


class GroupCreated(Change):
    """Creation of a consumer group: it starts in a topic at the first message, or after the last one.

    Raises:
        UnknownNameError: There is no such topic.
        MessageError: The name is not allowed, or the group has offsets in the topic already.
    """

    is_by_queue: ClassVar[bool] = True

    def __init__(self, access: BrokerAccess, group: str, topic: str, position: OffsetPosition) -> None:
        if not _GROUP.fullmatch(group):
            raise MessageError(
                f"{group[:40]!r} is not a name of a group; give 1 to 120 letters, digits, '_', '-', '%' and '|'"
            )
        super().__init__("groups.create", {"group": group, "topic": topic, "position": position.value}, is_named=True)
        if group in access.admin.groups_of(topic):
            raise MessageError(f"group {group!r} reads topic {topic!r} already; move its offsets instead")
        self._access = access
        self._group = group
        is_first = position is OffsetPosition.EARLIEST
        self._offsets = {
            span.queue: span.min_offset if is_first else span.max_offset for span in access.admin.queue_spans(topic)
        }
        self._unread = sum(span.message_count for span in access.admin.queue_spans(topic)) if is_first else 0

    @property
    def title(self) -> str:
        topic = self.target["topic"]
        return f"Create group {self._group!r}, which has {self.preview.amount} of topic {topic!r} to read"

    @cached_property
    def preview(self) -> ChangePreview:
        topics = {str(self.target["topic"]): self._unread} if self._unread else {}
        notes = ("Retention keeps the messages of the topic until the group has consumed them.",)
        undo = "It can be undone: the group is forgotten again."
        return ChangePreview(count=self._unread, noun="message", topics=topics, has_effect=True, notes=notes, undo=undo)

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        self._access.open_for_changes().admin().set_offsets(self._group, self._offsets)
        on_progress(self._unread)
        return ChangeResult(f"created group {self._group!r}", {"queues": len(self._offsets)})


# --- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDraft:
    """A message to send.

    Attributes:
        properties: Properties of the application.
        due_ms: Deliver time (epoch ms); None to deliver it at once.
    """

    topic: str
    body: bytes
    tag: str = ""
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    due_ms: int | None = None


class MessageSent(Change):
    """Send of one message.

    Raises:
        MessageError: The message cannot be sent to this topic.
    """

    def __init__(self, access: BrokerAccess, draft: MessageDraft) -> None:
        _application_topic(draft.topic)
        target = {"topic": draft.topic, "tag": draft.tag or None, "keys": list(draft.keys) or None, "due": draft.due_ms}
        super().__init__("messages.send", target, is_named=True, can_be_undone=draft.due_ms is not None)
        self._access = access
        self._draft = draft

    @property
    def title(self) -> str:
        return f"Send a message of {len(self._draft.body):,} bytes to topic {self._draft.topic!r}"

    @cached_property
    def preview(self) -> ChangePreview:
        draft, notes = self._draft, []
        spans = _spans(self._access, draft.topic)
        if not spans:
            notes.append(f"Topic {draft.topic!r} does not exist; the broker creates it, if it may.")
        elif not self._access.admin.groups_of(draft.topic):
            notes.append("No group has read this topic.")
        undo = "It cannot be undone: listeners may handle it at once."
        return ChangePreview(
            count=1,
            noun="message",
            topics={draft.topic: 1},
            tags={draft.tag: 1},
            first_ms=draft.due_ms,
            last_ms=draft.due_ms,
            time_name="due",
            notes=tuple(notes),
            undo=undo if draft.due_ms is None else "It can be undone while it is pending: it is cancelled.",
        )

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        draft = self._draft
        destination = f"{draft.topic}:{draft.tag}" if draft.tag else draft.topic
        template = RocketMQTemplate(self._access.open_for_changes())
        sent = template.sync_send(
            destination, draft.body, deliver_at=draft.due_ms, keys=draft.keys, headers=dict(draft.properties)
        )
        on_progress(1)
        facts = {"msg_id": sent.msg_id, "handle": sent.handle}
        return ChangeResult(f"sent message {sent.msg_id} to topic {draft.topic!r}", facts, sent)
