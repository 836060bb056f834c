"""Topic names: the system topics of RocketMQ, the sets of them, and the rules for legal names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from mqtemplate.errors import DestinationError
from mqtemplate.user_code import nearest, shown

__all__ = [
    "AUTO_CREATE_TOPIC",
    "DLQ_TOPIC_PREFIX",
    "HALF_TOPIC",
    "HAND_OVER_GROUP",
    "HAND_OVER_MOVED_TOPIC",
    "HAND_OVER_TOPIC",
    "LITE_QUEUE_PREFIX",
    "MARKS_TOPIC",
    "NOT_SENDABLE_TOPICS",
    "OFFSET_MOVED_TOPIC",
    "OP_TOPIC",
    "POP_PROGRESS_TOPIC",
    "RETRY_TOPIC_PREFIX",
    "REVIVE_TOPIC_PREFIX",
    "ROCKSDB_HALF_TOPIC",
    "ROCKSDB_OP_TOPIC",
    "SCHEDULES_TOPIC",
    "SCHEDULE_TOPIC",
    "SELF_TEST_TOPIC",
    "SYSTEM_GROUPS",
    "SYSTEM_TOPICS",
    "SYSTEM_TOPIC_PREFIX",
    "TIMER_TOPIC",
    "TRACE_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "UNDELIVERABLE_TOPIC",
    "check_given_topic",
    "check_send_topic",
    "check_topic",
    "is_application_topic",
    "is_broker_topic",
    "is_file_name",
    "is_in_namespace",
    "is_reply_topic",
    "is_schedule_group",
    "is_system_group",
    "is_system_topic",
    "nearest_topic",
    "needs_own_right",
    "reply_topic",
    "schedule_group",
]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Messages delayed by level; one queue for each level."""
TIMER_TOPIC = "rmq_sys_wheel_timer"
"""Messages delayed by a timer."""
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Half messages: messages of transactions."""
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Op messages: each names the half messages whose transactions have ended."""
ROCKSDB_HALF_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
"""Half messages of a broker of RocketMQ 5.5 that keeps the state of transactions in RocksDB."""
ROCKSDB_OP_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
"""Op messages of such a broker."""
POP_PROGRESS_TOPIC = "rmq_sys_POP_PROGRESS"
"""Of this library: the progress of groups that read by POP."""
HAND_OVER_TOPIC = "rmq_sys_MQTEMPLATE_HAND_OVER"
"""Of this library: delayed messages that are in transit to another broker."""
HAND_OVER_MOVED_TOPIC = "rmq_sys_MQTEMPLATE_HAND_OVER_MOVED"
"""Of this library: how the transit of each message ended."""
HAND_OVER_GROUP = "CID_RMQ_SYS_MQTEMPLATE_HAND_OVER"
"""Of this library: group whose committed offset is the first message in transit that is not settled."""
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Half messages that were discarded after too many checks; applications may read it."""
AUTO_CREATE_TOPIC = "TBW102"
"""Template for topics that are created by their first message."""
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
MARKS_TOPIC = "mqtemplate_dead_letter_marks"
"""Of this library: which dead letters an operator sent again or purged."""
OFFSET_MOVED_TOPIC = "OFFSET_MOVED_EVENT"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
SCHEDULES_TOPIC = "mqtemplate-schedules"
"""Topic of the schedules of an application, unless it names another one."""
RETRY_TOPIC_PREFIX = "%RETRY%"
DLQ_TOPIC_PREFIX = "%DLQ%"
REVIVE_TOPIC_PREFIX = "rmq_sys_REVIVE_LOG_"
"""Prefix of the topic of RocketMQ's deliveries by POP; the name of the cluster follows."""
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
"""Prefix of the system topics of 5.x brokers that are not in `SYSTEM_TOPICS`."""
LITE_QUEUE_PREFIX = "%LMQ%"
"""Prefix of RocketMQ's light queues: each has positions of messages that are stored in other topics."""

NOT_SENDABLE_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        ROCKSDB_HALF_TOPIC,
        ROCKSDB_OP_TOPIC,
        POP_PROGRESS_TOPIC,
        HAND_OVER_TOPIC,
        HAND_OVER_MOVED_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        OFFSET_MOVED_TOPIC,
        SELF_TEST_TOPIC,
    }
)
"""Topics that only the broker writes to: the check of each send uses it.

Source: ``TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET``, the timer topic, and those of this library.
"""

SYSTEM_TOPICS = frozenset(
    NOT_SENDABLE_TOPICS | {AUTO_CREATE_TOPIC, TRACE_TOPIC, "BenchmarkTest", "CHECKPOINT_TOPIC"},
)
"""Topics of RocketMQ itself: they have no namespace, and administrators cannot change or delete them.

Source: ``TopicValidator.SYSTEM_TOPIC_SET``.
"""

UNDELIVERABLE_TOPIC = DLQ_TOPIC_PREFIX + "SCHEDULE"
"""Topic of delayed messages that cannot be delivered to their real topic."""
SYSTEM_GROUPS = frozenset(
    {
        "DEFAULT_CONSUMER",
        "DEFAULT_PRODUCER",
        "TOOLS_CONSUMER",
        "SCHEDULE_CONSUMER",
        "FILTERSRV_CONSUMER",
        "__MONITOR_CONSUMER",
        "CLIENT_INNER_PRODUCER",
        "SELF_TEST_P_GROUP",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PULL",
    }
)
"""Groups of RocketMQ itself. Source: ``MixAll``."""

_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_GROUPS_PREFIXES = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)
_LEGAL_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_FILE_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")
_MAX_LENGTH = 127
_MAX_COMPARED = 200
_REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"
_MAX_LENGTH_WITH_PREFIX = 255


@lru_cache(maxsize=4_096)
def check_topic(topic: str) -> str:
    """Return *topic* if it is a legal name. Source: ``TopicValidator.validateTopic``.

    Raises:
        DestinationError: The name is empty, too long, or has characters other than ``%|a-zA-Z0-9_-``.
    """
    if not topic:
        raise DestinationError("the topic is empty; give 'topic' or 'topic:tag'")
    if not _LEGAL_NAME.fullmatch(topic):
        raise DestinationError(
            f"topic {shown(topic)} has characters that are not allowed; use letters, digits, '_', '-', '%', '|'"
        )
    has_prefix = topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    max_length = _MAX_LENGTH_WITH_PREFIX if has_prefix else _MAX_LENGTH
    if len(topic) > max_length:
        raise DestinationError(f"topic {topic[:40]!r}… has {len(topic)} characters, allowed are {max_length}")
    return topic


def check_given_topic(topic: object) -> str:
    """Return the topic, or the group, that a caller gave, if it is a legal name; see `check_topic`.

    Raises:
        DestinationError: It is not text, or not a legal name.
    """
    if not isinstance(topic, str):
        raise DestinationError(f"a topic or group must be text, got {type(topic).__name__} {shown(topic)}")
    return check_topic(topic)


def check_send_topic(topic: str) -> str:
    """Return *topic* if applications may send to it.

    Raises:
        DestinationError: The name is illegal, or only the broker writes to the topic.
    """
    if check_topic(topic) in NOT_SENDABLE_TOPICS:
        raise DestinationError(
            f"topic {topic!r} belongs to the broker; send to the topic the message is for, with a delay option"
        )
    return topic


def is_in_namespace(topic: str, namespace: str) -> bool:
    """Return True if a topic, or the group of a retry or dead letter topic, has the prefix of a namespace."""
    name = topic.removeprefix(RETRY_TOPIC_PREFIX).removeprefix(DLQ_TOPIC_PREFIX)
    return name.startswith(f"{namespace}%")


def is_file_name(name: str) -> bool:
    """Return True if *name* can be the name of one file. Names from files of others are checked: they become paths.

    The names of brokers and clusters are topics too, so more characters are allowed than in `check_topic`.
    """
    return _FILE_NAME.fullmatch(name) is not None and name not in (".", "..")


def is_broker_topic(topic: str) -> bool:
    """Return True for a topic in which only the broker stores messages, mostly for other topics."""
    return topic in NOT_SENDABLE_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX) or topic == UNDELIVERABLE_TOPIC


def needs_own_right(topic: str) -> bool:
    """Return True for a topic that the default rights of an account do not open for readers.

    Clients of all accounts write to the trace topic, so it has the ids and keys of all topics. Only operators use the
    marks of dead letters.
    """
    return is_broker_topic(topic) or topic in (TRACE_TOPIC, MARKS_TOPIC, AUTO_CREATE_TOPIC, "CHECKPOINT_TOPIC")


def is_application_topic(topic: str) -> bool:
    """Return True for a topic to which applications send: not of the broker itself, no retries, no dead letters."""
    return not topic.startswith(_GROUPS_PREFIXES) and not is_system_topic(topic)


def is_system_topic(topic: str) -> bool:
    """Return True for a topic of a broker, of a cluster, or of this library.

    ``RMQ_SYS_`` is no rule of RocketMQ, but each name with it is of RocketMQ, so those of later versions are no topics
    of an application either.
    """
    return (
        topic in SYSTEM_TOPICS
        or topic == MARKS_TOPIC
        or topic.startswith((SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX.upper(), LITE_QUEUE_PREFIX))
        or is_reply_topic(topic)
    )


def is_system_group(group: str) -> bool:
    """Return True for a group of RocketMQ itself."""
    return group in SYSTEM_GROUPS or group.startswith(_SYSTEM_GROUP_PREFIX)


def schedule_group(schedule: str) -> str:
    """Return the consumer group that runs a schedule, with the topic `SCHEDULES_TOPIC`."""
    return f"{SCHEDULES_TOPIC}-{schedule}"


def is_schedule_group(group: str) -> bool:
    """Return True for a group of the schedules of an application: one that runs them, or that has their state.

    Schedules with a topic of their own have other groups.
    """
    return group.startswith(schedule_group(""))


def nearest_topic(topic: str, known: Iterable[str]) -> str | None:
    """Return the known topic of an application whose name is most similar to *topic*, but not the same.

    None if none is similar, or so many are that a hint would be chance: ``orders-1``, ``orders-2``, ….
    """
    # A topic that was missing a moment ago may be among the known ones by now.
    names = [name for name in known if name != topic and is_application_topic(name)]
    if len(names) > _MAX_COMPARED:  # a comparison takes 30 us
        names = [name for name in names if abs(len(name) - len(topic)) <= 2 and _have_same_end(name, topic)]
    if len(names) > _MAX_COMPARED:
        return None
    return nearest(topic, names)


def _have_same_end(name: str, other: str) -> bool:
    """Return True if both begin or end alike, as they do with one typing error."""
    return name[:3] == other[:3] or name[-3:] == other[-3:]


def reply_topic(cluster_name: str) -> str:
    """Return the topic that replies name. Source: ``MixAll.getReplyTopic``."""
    return f"{cluster_name}{_REPLY_TOPIC_SUFFIX}"


def is_reply_topic(topic: str) -> bool:
    """Return True for the topic that the replies of some cluster name."""
    return topic.endswith(_REPLY_TOPIC_SUFFIX)
