"""Headers of POP consumption, and the texts in their fields.

A broker gives a popped message to one member of a group, for a limited time. The member acknowledges it or changes the
time. One response has messages of several queues; three of its fields describe them for all messages together::

    startOffsetInfo  0 3 17;1 0 0                kind of the topic, queue ID, queue offset at which the pop began
    msgOffsetInfo    0 3 17,19;1 0 0             kind of the topic, queue ID, queue offsets of the messages
    orderCountInfo   0 qo3%17 2;0 qo3%19 1;0 3 1  the same, and how often messages were consumed before

The kind of a topic is 0, 1 for the retry topic ``%RETRY%group_topic``, 2 for ``%RETRY%group+topic``.

Source: RocketMQ ``remoting: protocol/header``, ``ExtraInfoUtil``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader
from mqtemplate.topics import RETRY_TOPIC_PREFIX

INIT_MIN, INIT_MAX = 0, 1
"""Values of ``initMode``: a new group starts at the first message, or at the last one."""


class PopMessageRequestHeader(RpcRequestHeader):
    """Request to pop messages. Times are in milliseconds.

    Attributes:
        queue_id: -1 for all queues of the topic.
        invisible_time: Time for which no other member receives the messages.
        poll_time: Time for which the broker may hold the request.
        born_time: When the client created the request; 0 if it does not tell.
        init_mode: First offset of a new group: `INIT_MIN` or `INIT_MAX`.
        exp_type, exp: Expression that selects messages. None: all messages.
        order: True: the broker blocks a queue until the messages of the last pop are acknowledged.
        attempt_id: With *order*: the same text repeats a pop whose response was lost.
        mqt_fair_by: Of our clients: name of the property whose values take turns, within two limits.
    """

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int
    invisible_time: Long
    poll_time: Long
    born_time: Long = 0
    init_mode: int
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None
    mqt_fair_by: str | None = None
    mqt_max_in_flight_per_key: int | None = None
    mqt_max_rate_per_key: str | None = None


class PopMessageResponseHeader(CommandHeader):
    """Header of the response to a pop. The module describes the texts.

    Attributes:
        pop_time, invisible_time, revive_qid: Parts of the receipt handle of each message.
        rest_num: Number of messages that the group could pop after these.
    """

    pop_time: Long
    invisible_time: Long
    revive_qid: int
    rest_num: Long
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessageRequestHeader(RpcRequestHeader):
    """Acknowledgement of one popped message.

    Attributes:
        topic: Topic in which the message is stored: the retry topic, if it was popped from there.
        extra_info: Receipt handle: the property ``POP_CK`` of the message.
        offset: Queue offset of the message.
    """

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: Long


class ChangeInvisibleTimeRequestHeader(AckMessageRequestHeader):
    """Request to change the invisible time of one popped message, in milliseconds from now.

    Attributes:
        suspend: True: the next delivery does not count as another attempt.
    """

    invisible_time: Long
    suspend: bool = False


class ChangeInvisibleTimeResponseHeader(CommandHeader):
    """Parts of the new receipt handle."""

    pop_time: Long
    invisible_time: Long
    revive_qid: int


class PeekMessageRequestHeader(RpcRequestHeader):
    """Request for the messages that a group would pop. They stay visible."""

    consumer_group: str
    topic: str
    queue_id: int
    max_msg_nums: int


class NotificationRequestHeader(RpcRequestHeader):
    """Request to wait until a group could pop messages. See `PopMessageRequestHeader`."""

    consumer_group: str
    topic: str
    queue_id: int
    poll_time: Long
    born_time: Long = 0
    order: bool = False
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponseHeader(CommandHeader):
    """Result of the wait.

    Attributes:
        has_msg: True if there are messages.
        polling_full: True if too many requests wait already.
    """

    has_msg: bool = False
    polling_full: bool = False


class PollingInfoRequestHeader(RpcRequestHeader):
    """Query for the number of pops that the broker holds for one queue of a group, or for -1."""

    consumer_group: str
    topic: str
    queue_id: int


class PollingInfoResponseHeader(CommandHeader):
    """Number of held pops."""

    polling_num: int


# --- topics and texts of popped messages -----------------------------------------------------------


def popped_topic(topic: str, group: str) -> tuple[str, int]:
    """Return the topic whose pop returned a message that is stored in *topic*, and the kind of *topic*.

    *topic* may be the retry topic that a group has for the returned one. Source: ``ExtraInfoUtil.getRealTopic``.
    """
    for kind, separator in ((1, "_"), (2, "+")):
        prefix = f"{RETRY_TOPIC_PREFIX}{group}{separator}"
        if topic.startswith(prefix) and topic != prefix:
            return topic.removeprefix(prefix), kind
    return topic, 0


@dataclass(frozen=True, slots=True)
class PoppedQueue:
    """The messages of one queue in a response.

    Attributes:
        topic_type: Kind of the topic: see the module.
        start_offset: Queue offset at which the pop began.
        offsets: Queue offsets of the messages, ascending.
        counts: Queue offset -> how often the message was consumed before. Only for ordered pops.
    """

    topic_type: int
    queue_id: int
    start_offset: int
    offsets: Sequence[int]
    counts: Mapping[int, int] = field(default_factory=dict)


def parse_queues(header: PopMessageResponseHeader) -> list[PoppedQueue]:
    """Return the queues that a response describes.

    Raises:
        RemoteProtocolError: A text cannot be read.
    """
    try:
        starts, offsets = _parts(header.start_offset_info), _parts(header.msg_offset_info)
        counts = {key: int(count) for key, count in _parts(header.order_count_info).items()}
        queues = []
        for (kind, queue_id), start in starts.items():
            listed = [int(offset) for offset in offsets.get((kind, queue_id), "").split(",") if offset]
            least = counts.get((kind, queue_id))
            each = {offset: counts.get((kind, f"qo{queue_id}%{offset}"), least) for offset in listed}
            known = {offset: count for offset, count in each.items() if count is not None}
            queues.append(PoppedQueue(int(kind), int(queue_id), int(start), listed, known))
    except ValueError as exc:
        raise RemoteProtocolError(f"the header of a response to a pop cannot be read: {exc}") from exc
    return queues


def _parts(text: str | None) -> dict[tuple[str, str], str]:
    """Return the entries of one of the texts: kind of the topic and queue -> the rest."""
    found = {}
    for part in text.split(";") if text else ():
        kind, queue, rest = part.split(" ")
        found[kind, queue] = rest
    return found


def start_offset_info(queues: Sequence[PoppedQueue]) -> str:
    """Return the text of ``startOffsetInfo``."""
    return ";".join([f"{each.topic_type} {each.queue_id} {each.start_offset}" for each in queues])


def msg_offset_info(queues: Sequence[PoppedQueue]) -> str:
    """Return the text of ``msgOffsetInfo``."""
    return ";".join([f"{each.topic_type} {each.queue_id} {','.join(map(str, each.offsets))}" for each in queues])


def order_count_info(queues: Sequence[PoppedQueue]) -> str:
    """Return the text of ``orderCountInfo``: counts of messages that were consumed before, and the least of a queue.

    Old clients read only the latter. Source: ``ConsumerOrderInfoManager.update``.
    """
    parts = []
    for each in queues:
        if each.counts:
            parts += [f"{each.topic_type} qo{each.queue_id}%{offset} {n}" for offset, n in each.counts.items() if n]
            parts.append(f"{each.topic_type} {each.queue_id} {min(each.counts.values())}")
    return ";".join(parts)
