"""The `Broker` interface, which every broker implements.

The template and the listeners use this interface only. There are two implementations:
`mqtemplate.brokers.embedded.broker.EmbeddedBroker` stores messages in this process, and
`mqtemplate.brokers.remote.broker.RemoteBroker` is a client of a RocketMQ cluster. The tests in
`mqtemplate.testing.contract` run over both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import getpid
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mqtemplate.broker.admin import BrokerAdmin
from mqtemplate.broker.consumers import (
    ConsumerGroups,
    PopConsumers,
)
from mqtemplate.broker.parts import (
    DelayConsole,
    DelayedMessages,
    MessageReader,
    MessageSends,
    Requests,
    Transactions,
)
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError, UnsupportedError
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.processes import OwnerProcess
from mqtemplate.results import DiskSpace
from mqtemplate.services import Service
from mqtemplate.topics import SCHEDULE_TOPIC

if TYPE_CHECKING:  # few programs hand messages over
    from mqtemplate.broker.hand_over import DelayLimits, FoundRecords, OldBroker


def not_running(name: str) -> BrokerClosedError:
    """Return the error for a call of a broker that is not open."""
    return BrokerClosedError(f"broker {name!r} is not running; call start() first, or use it in a with block")


class BrokerLifecycle:
    """State of a broker that stores messages: open or not, and its process. The parts check it at each call of a user.

    Args:
        name: Name of the broker.
        place: Where it stores messages, for the error in a forked process.

    Attributes:
        is_open: True between start and close.
        owner: The process that started the broker.
    """

    def __init__(self, name: str, place: str) -> None:
        self._name = name
        self._owner_text = f"broker {name!r} ({place}), with the templates and consumers that use it,"
        self.owner = OwnerProcess(self._owner_text)
        self.is_open = False

    def begin(self) -> None:
        """Belong to this process from now on."""
        self.owner = OwnerProcess(self._owner_text)

    def check(self) -> None:
        """Check that the broker is open.

        Raises:
            BrokerClosedError: It is not running.
            ForkedError: The parent process has started it.
        """
        if not self.is_open:
            raise not_running(self._name)
        if getpid() != self.owner.pid:  # not `owner.check`: each send comes here
            raise self.owner.error()


class Capability(Enum):
    """Optional features of a broker."""

    DELAY_LEVEL = "delay levels"
    TIMER = "any delay or deliver time"
    RETRY_DELAY = "exact retry delays"
    BATCH_DELAY = "delays on a batch"
    SCHEDULE_CHANGE = "cancel and reschedule"
    TIMER_CHANGE = "changes of messages with a timer"
    RECALL = "cancel messages with a timer, by handle only"
    PENDING = "queries for pending messages"
    PENDING_KEYS = "at most one pending message for a key, and changes together with sends"
    PENDING_KEY_STEPS = "one pending message for a key in two steps: look up, then send and cancel"
    QUERY = "find messages by id and key"
    LOCAL_FILES = "store files in a directory of this machine"
    TRANSACTION = "transactions"
    TRANSACTION_DELAY = "delays on a message in a transaction"
    REQUEST_REPLY = "requests and replies"
    SQL92 = "SQL92 selectors"
    RECORD_BLOCK = "blocks of stored records"
    SEQUENCED_SEND = "sends whose repeats are dropped"
    POP = "POP consumption"
    KEY_LIMITS = "limits for each key by POP"


class TopicMessageType(Enum):
    """Type of the messages of a topic. RocketMQ 5: the attribute ``message.type``, which its proxy checks.

    A topic without a type takes all messages by the remoting protocol, and NORMAL ones by gRPC.
    """

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    MIXED = "MIXED"


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """State of a store in this process.

    Attributes:
        error: Why nothing can be stored or flushed; None if all is well.
        not_flushed_bytes: Number of stored bytes that are not on the disk yet.
        disk: Space of the disk; None if the store is in memory.
        refusal: Why new messages are refused for want of disk space, and what helps; None while they are accepted.
    """

    error: str | None
    not_flushed_bytes: int
    disk: DiskSpace | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """Messages of one topic because of which commit log files stay that are older than ``file-reserved-time``.

    Attributes:
        group: Consumer group that has not consumed them, or whose dead letters they are.
        topic: Their topic; ``%DLQ%group`` for dead letters.
        message_count: Number of these messages.
        since_ms: Time (epoch ms) at which the first of the files became that old.
        byte_count: Size of these files.
    """

    group: str
    topic: str
    message_count: int
    since_ms: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class CopyFollower:
    """A process that keeps another directory current from a copy, as it has last written there.

    Attributes:
        folder: The directory that it keeps current.
        seen_ms: Time of its sign of life, by its own clock (epoch ms).
        copied_ms: Everything stored until this time is in its directory (epoch ms).
        is_warm: Its queues, index and timers have all records, so a promotion builds nothing.
    """

    host: str
    pid: int
    folder: str
    seen_ms: int
    copied_ms: int
    is_warm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHealth:
    """State of the continuous copy of a store directory.

    Attributes:
        to: The place of the copy, as the settings name it.
        lag_bytes: Bytes of the commit log that are not in the copy.
        lag_ms: Time since everything was in the copy; 0 if everything is.
        copied_ms: Everything stored until this time (epoch ms) is in the copy; None if this process has copied nothing.
        error: Why the last attempt failed; None if it did not.
        max_lag_ms: Lag that the settings allow.
        is_refused: Copying has ended, and no retry helps: *error* says why.
        epoch: Number of the start of this process in the copy; None before it has begun.
        owner: Process, host and directory that write the copy.
        snapshot_ms: Time of the last snapshot of all tables (epoch ms); None if the copy has none.
        lease_ms: Time after a sign of life in which messages are accepted; None without ``mqtemplate.copy.lease``.
        followers: Processes that follow the copy, as of the last sign of life of this process.
    """

    to: str
    lag_bytes: int
    lag_ms: int
    copied_ms: int | None
    error: str | None
    max_lag_ms: int
    is_refused: bool = False
    epoch: int | None = None
    owner: str = ""
    snapshot_ms: int | None = None
    lease_ms: int | None = None
    followers: Sequence[CopyFollower] = ()


class Broker(ABC):
    """A message broker: it stores messages and delivers them to consumers.

    Attributes:
        name: Name of the broker, as in `MessageQueue.broker_name`.
        clock: Clock of the broker; delays count by it.
        capabilities: Optional features that this broker has.
        is_embedded: True if the broker works in this process, so that its settings, metrics and store are here.
        path: The store directory; None if it is in memory, or not on this machine.
        metrics: Metrics of the broker; None if another process has them.
        delay_levels_ms: Delays of the levels, level 1 first. A cluster does not report its own, so these are
            the ones of the settings: by default RocketMQ's.
        retry_delays_ms: Delays of the first, second, … retry, if `Consumer.send_back` gets none. The last one repeats.
        sends: Sends messages.
        requests: Sends requests, and replies.
        transactions: Ends and checks transactions.
        reader: Reads and finds messages.
        groups: Consumer groups.
        pop: Consumption by POP.
        delayed: Pending messages.

    Raises:
        BrokerClosedError: A part is used while the broker is not running.
    """

    name: str
    clock: Clock
    capabilities: frozenset[Capability]
    is_embedded: bool = False
    path: Path | None = None

    @property
    def metrics(self) -> Metrics | None:
        return None

    @property
    @abstractmethod
    def delay_levels_ms(self) -> Sequence[int]: ...

    @property
    @abstractmethod
    def retry_delays_ms(self) -> Sequence[int]: ...

    @property
    @abstractmethod
    def sends(self) -> MessageSends: ...

    @property
    @abstractmethod
    def requests(self) -> Requests: ...

    @property
    @abstractmethod
    def transactions(self) -> Transactions: ...

    @property
    @abstractmethod
    def reader(self) -> MessageReader: ...

    @property
    @abstractmethod
    def groups(self) -> ConsumerGroups: ...

    @property
    def pop(self) -> PopConsumers:
        """Consumption by POP.

        Raises:
            UnsupportedError: The broker does not have `Capability.POP`.
        """
        raise UnsupportedError(
            f"broker {self.name!r}, a {type(self).__name__}, has no consumption by POP; leave request_mode out: its "
            "listeners pull, and a slow one can have a longer consume_timeout"
        )

    @property
    @abstractmethod
    def delayed(self) -> DelayedMessages: ...

    @property
    def delay_console(self) -> DelayConsole | None:
        """State of the delay services of a RocketMQ cluster; None for other brokers."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Open files or connections. A second call has no effect."""

    @abstractmethod
    def close(self) -> None:
        """Close files or connections; acknowledged messages are kept. A second call has no effect."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def outage(self) -> str | None:
        """Return why the broker cannot be reached now; None if it can, as far as is known without a request."""
        return None

    # --- topics --------------------------------------------------------------------------------

    @abstractmethod
    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of *topic*. A topic that does not exist is created, as by RocketMQ.

        Raises:
            DestinationError: The name is illegal, or the topic belongs to the broker.
        """

    @abstractmethod
    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        """Create a topic, or add queues to it.

        Args:
            message_type: None leaves the type of an existing topic as it is.

        Raises:
            UnsupportedError: The broker creates no topics, or has no types of messages.
        """

    def delete_topic(self, topic: str) -> None:
        """Delete a topic of applications, with the offsets of all groups in it.

        Raises:
            UnknownNameError: An embedded broker does not have it.
            UnsupportedError: The broker does not delete topics.
        """
        self.admin().delete_topic(topic)

    def topic_names(self) -> Sequence[str]:
        """Return the names of all topics of applications; the topics of the broker itself are left out.

        Raises:
            UnsupportedError: The broker does not list its topics.
        """
        raise UnsupportedError(f"broker {self.name!r} does not list its topics; name each topic")

    @abstractmethod
    def expect_topics(self, topics: Iterable[str]) -> None:
        """Note topics that listeners of the application will read, before they subscribe.

        A broker that reports or refuses messages to unknown topics takes these for known.
        """

    def unreachable(self) -> Mapping[str, str | None]:
        """Request an answer of each broker. Return its name -> None, or the reason if it does not answer.

        Raises:
            BrokerClosedError: This object is not started.
        """
        self.reader.min_offset(MessageQueue(SCHEDULE_TOPIC, self.name, 0))  # every broker has this topic
        return {self.name: None}

    # --- operators -----------------------------------------------------------------------------

    def admin(self) -> BrokerAdmin:
        """Return the topics, groups and offsets of this broker, for operators. The broker is started.

        Raises:
            UnsupportedError: The broker has no administration.
        """
        raise UnsupportedError(
            f"broker {self.name!r}, a {type(self).__name__}, does not list its topics and groups: implement "
            "Broker.admin, or turn off what shows them (mqtemplate.management.dashboard.enabled)"
        )

    @property
    def hand_over(self) -> OldBroker:
        """The part of this broker in a hand-over of its pending messages to another broker.

        Raises:
            UnsupportedError: Messages cannot move from this kind of broker to another one.
        """
        raise UnsupportedError(
            f"broker {self.name!r}, a {type(self).__name__}, cannot reserve its pending messages, so they cannot "
            "move to another broker; only an embedded broker and a server of this library can"
        )

    def delay_limits(self) -> DelayLimits:
        """Return which delays this broker can keep, as the brokers behind it say.

        Raises:
            UnsupportedError: It does not say.
            BrokerError: A broker does not answer.
        """
        raise UnsupportedError(f"broker {self.name!r}, a {type(self).__name__}, does not say which delays it can keep")

    def find_records(self, topics: Sequence[str], msg_id: str) -> FoundRecords:
        """Return the records that have a message id in one of *topics*, which may be system topics, of all brokers.

        Raises:
            BrokerError: A broker does not answer.
            UnsupportedError: This kind of broker has no queries by id.
        """
        raise UnsupportedError(
            f"broker {self.name!r}, a {type(self).__name__}, does not find messages by id everywhere"
        )

    def store_health(self) -> StoreHealth | None:
        """Return the state of the store now; None if it is in another process."""
        return None

    def retention_holds(self) -> Sequence[RetentionHold]:
        """Return what keeps old files of the store in this process; nothing if it is in another process."""
        return ()

    def copy_health(self) -> CopyHealth | None:
        """Return how far the continuous copy of the store directory is; None without one in this process."""
        return None

    # --- time ----------------------------------------------------------------------------------

    @abstractmethod
    def services(self) -> Sequence[Service]:
        """Return the background services, for a harness that steps them on a virtual clock."""
