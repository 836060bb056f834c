"""Pending messages of a RocketMQ cluster: read from its system topics with pulls and key queries; recalls."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.errors import BrokerError, ConfigurationError, MessageError, OffsetOutOfRangeError, UnsupportedError
from mqtemplate.message import BROKER_PROPERTIES, DELAY_PROPERTIES, Message, MessageExt, MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqtemplate.user_code import shown

# --- settings of brokers --------------------------------------------------------------------------


_VALID_MS = 60_000


class DelayConfig(NamedTuple):
    """Settings of one broker.

    Attributes:
        levels: The delay of each level.
        slot_ms: Length of a slot of the timer wheel; None for a broker without timers.
        timer_age_ms: Age of the oldest record that can belong to a pending timer. A longer timer is stored again.
        max_delay_ms: The longest delay of a timer; 0 without timers.
        most_in_slot: Timers of one slot from which the broker refuses more; None if it does not report it.
        shapes: Topic -> shape of its releases, for a reader. Only a server of this library reports them.
    """

    levels: DelayLevels
    slot_ms: int | None
    timer_age_ms: int
    max_delay_ms: int = 0
    most_in_slot: int | None = None
    shapes: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def parse(cls, text: str) -> DelayConfig:
        """Parse the response to GET_BROKER_CONFIG: lines ``name=value``.

        Raises:
            ValueError: A value is missing, or is not a number above 0.
        """
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        levels = DelayLevels.parse(values.get("messageDelayLevel", ""))
        if "timerPrecisionMs" not in values:  # RocketMQ before 5.0
            return cls(levels, None, 0)
        slot_ms = _positive_number(values, "timerPrecisionMs")
        roll_ms = _positive_number(values, "timerRollWindowSlot") * slot_ms
        max_delay_ms = _positive_number(values, "timerMaxDelaySec") * 1_000
        most = parse_number(values.get("timerCongestNumEachSlot"))
        shapes = _shapes(values.get("topicShapes"))
        return cls(levels, slot_ms, min(roll_ms, max_delay_ms), max_delay_ms, most, shapes)


def _shapes(text: str | None) -> Mapping[str, str]:
    """Parse the shapes of topics; none for any other text."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(topic): str(shape) for topic, shape in found.items()} if isinstance(found, dict) else {}


def _positive_number(values: Mapping[str, str], name: str) -> int:
    number = parse_number(values.get(name))
    if number is None or number <= 0:
        raise ValueError(f"{name} must be a number above 0, got {values.get(name)!r:.64}")
    return number


class DelayConfigs:
    """Settings of the brokers, requested at their first use and again after a minute."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._by_broker: dict[str, tuple[int, DelayConfig]] = {}

    def forget(self) -> None:
        """Request the settings again at their next use: they were changed."""
        self._by_broker.clear()

    def of(self, broker_name: str) -> DelayConfig:
        """Return the settings of a broker.

        Raises:
            BrokerError: The broker does not answer, or refuses: access control may forbid this request.
        """
        now_ms = self._context.clock.now_ms()
        requested_ms, config = self._by_broker.get(broker_name, (0, None))
        if config is None or now_ms - requested_ms > _VALID_MS:
            request = RemotingCommand.request(RequestCode.GET_BROKER_CONFIG)
            address = self._context.routes.address(broker_name)
            response = self._context.call(address, request, f"get the delay levels of broker {broker_name!r}")
            try:
                config = DelayConfig.parse(response.body.decode())
            except (ValueError, ConfigurationError) as exc:
                raise BrokerError(
                    f"broker {broker_name!r} answers GET_BROKER_CONFIG without delay levels: {exc}"
                ) from exc
            self._by_broker[broker_name] = now_ms, config
        return config


# --- records of the timer topic -------------------------------------------------------------------


_ValueT = TypeVar("_ValueT")


class TimerId(NamedTuple):
    """Identity of a timer. A recall deletes the messages with its id in one slot of one broker.

    Attributes:
        slot_ms: Time of the slot, at which the broker delivers.
    """

    broker_name: str
    msg_id: str
    slot_ms: int


class TimerRecords(Generic[_ValueT]):
    """Timers by identity, without those that were deleted.

    - A timer beyond the window of the wheel is stored again; the newest record counts.
    - A mark deletes the messages of its slot, whether they were stored before it or after it.

    Args:
        convert: Returns what to keep of a record.

    Attributes:
        deleted: Timers that have a mark, and possibly no record.
    """

    def __init__(self, convert: Callable[[MessageExt], _ValueT]) -> None:
        self.deleted: set[TimerId] = set()
        self._convert = convert
        self._records: dict[TimerId, tuple[int, _ValueT]] = {}

    def add(self, record: MessageExt) -> None:
        """Add a record of the timer topic."""
        timer = timer_id(record)
        if is_mark(record):
            self.deleted.add(timer)
        elif timer not in self._records or self._records[timer][0] <= record.physical_offset:
            self._records[timer] = record.physical_offset, self._convert(record)

    def remaining(self) -> dict[TimerId, _ValueT]:
        """Return the timers that are not deleted."""
        return {timer: value for timer, (_, value) in self._records.items() if timer not in self.deleted}


def is_mark(record: MessageExt) -> bool:
    """Return True for the record of a recall."""
    return Property.TIMER_DEL_UNIQKEY in record.properties


def timer_id(record: MessageExt) -> TimerId:
    """Return the identity of a timer, or of the timer that a mark deletes."""
    properties = record.properties
    msg_id = properties.get(Property.TIMER_DEL_UNIQKEY)
    if msg_id is None:
        msg_id = record.msg_id
    else:  # RocketMQ 5.3, and 5.5 with appendTopicForTimerDeleteKey: "topic+id"
        msg_id = msg_id.removeprefix(f"{properties.get(Property.REAL_TOPIC, '')}+")
    return TimerId(record.broker_name, msg_id, parse_number(properties.get(Property.TIMER_OUT_MS)) or 0)


# --- recalls --------------------------------------------------------------------------------------


_RECENT_MS = 5_000  # a mark is in the timer topic and in the index some milliseconds after the response
_REFUSED_RECALL = (ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
_TOO_OLD = "brokers can cancel from RocketMQ 5.3 on"


class Recalls:
    """Sends recalls, and remembers them for some seconds."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._recent: dict[TimerId, int] = {}

    def is_recent(self, timer: TimerId) -> bool:
        """Return True if this object has recalled a timer, and its mark may not be readable yet."""
        return timer in self._recent

    def recall(self, handle: RecallHandle) -> ScheduleChangeStatus:
        """Recall a timer; the broker accepts a recall without a check that the message is pending.

        Raises:
            UnsupportedError: The broker's ``recallMessageEnable`` is off, or it is too old.
        """
        now_ms = self._context.clock.now_ms()
        if handle.deliver_ms <= now_ms:
            return ScheduleChangeStatus.ALREADY_DELIVERED
        topic = self._context.namespace.unwrap(handle.topic)
        self._context.routes.existing(topic)  # its route has the address of the broker
        response, address = self._request(handle.broker_name, self._context.namespace.wrap(topic), handle)
        if response.code == ResponseCode.SUCCESS:
            self._remember(TimerId(handle.broker_name, handle.msg_id, handle.deliver_ms - 1), now_ms)
            return ScheduleChangeStatus.CANCELLED
        if response.code == ResponseCode.ILLEGAL_OPERATION and handle.deliver_ms <= self._context.clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        raise _recall_error(response, f"cancel message {handle.msg_id} of {handle.topic!r}", address)

    def _remember(self, timer: TimerId, now_ms: int) -> None:
        for old in [each for each, since_ms in self._recent.items() if now_ms - since_ms > _RECENT_MS]:
            self._recent.pop(old, None)
        self._recent[timer] = now_ms

    # --- support -------------------------------------------------------------------------------

    def check_versions(self) -> None:
        """Raise `UnsupportedError` if all brokers are older than RocketMQ 5."""
        routes, instance = self._context.routes, self._context.instance
        if all(instance.is_before_5(routes.address(name)) for name in routes.master_names()):
            raise UnsupportedError(
                f"this RocketMQ cluster has no timers and cancels no message; {_TOO_OLD}, and only messages with a "
                "timer, or use the embedded broker or our server"
            )

    def are_enabled(self) -> bool:
        """Return True if all brokers recall timers."""
        try:
            for name in self._context.routes.master_names():
                self.check_enabled(name)
        except BrokerError:
            return False
        return True

    def check_enabled(self, broker_name: str) -> None:
        """Raise `UnsupportedError` if a broker refuses recalls. It gets a recall that has no effect."""
        over = RecallHandle(AUTO_CREATE_TOPIC, broker_name, 1, "0")  # the broker refuses its time, after other checks
        response, address = self._request(broker_name, AUTO_CREATE_TOPIC, over)
        if response.code in _REFUSED_RECALL:
            raise _recall_error(response, "recall messages", address)

    def _request(self, broker_name: str, wire_topic: str, handle: RecallHandle) -> tuple[RemotingCommand, str]:
        header = RecallMessageRequestHeader(
            producer_group=self._context.namespace.wrap(self._context.settings.producer_group),
            topic=wire_topic,
            recall_handle=encode_handle(handle),
            broker_name=broker_name,
        )
        address = self._context.routes.address(broker_name)
        request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, header)
        return self._context.instance.invoke(address, request), address


def _recall_error(response: RemotingCommand, operation: str, address: str) -> BrokerError:
    problem = response_error(response, operation, address)
    # RocketMQ: RecallMessageProcessor. Access control answers with the same code.
    if response.code == ResponseCode.NO_PERMISSION and "recall" in (response.remark or "").lower():
        return UnsupportedError(f"{problem}; set recallMessageEnable=true on the broker")
    if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return UnsupportedError(f"{problem}; {_TOO_OLD}")
    return problem


# --- pending messages -----------------------------------------------------------------------------


_PAGE = 256  # a broker returns 32 of them by default
_SKEW_MS = 60_000  # clocks of brokers and clients differ, and a broker may be late with its timers
_NOT_SENT_AGAIN = BROKER_PROPERTIES.union(DELAY_PROPERTIES)
_MOST_BY_KEY = 32  # a broker returns at most 64 messages of its index, and may find other keys of the same hash


class Backlog:
    """Reader of the pending messages of all brokers.

    A message is pending if it is due later than now, and no recall has deleted it. Records stay in the system topics
    after their delivery. All reads start at the oldest record that may be pending.
    """

    def __init__(self, context: ClientContext, queries: Queries, configs: DelayConfigs) -> None:
        self._context = context
        self._queries = queries
        self._configs = configs

    def pending(self, query: PendingQuery) -> Iterator[tuple[TimerId, PendingMessage]]:
        """Yield the pending messages that match *query*, in no particular order.

        Raises:
            BrokerError: There are more records to read than ``pending_read_limit``.
        """
        if query.key is not None:
            ids = self.ids_with_key(query.key)
            if ids is not None:
                yield from self._pending_of(ids, query)
                return
        left = self._context.settings.pending_read_limit
        for broker_name in self._context.routes.master_names():
            config = self._configs.of(broker_name)
            if config.slot_ms is not None:
                queue = MessageQueue(TIMER_TOPIC, broker_name, 0)
                records, left = self._read(queue, config.timer_age_ms, left)
                yield from self._timers(records, query)
            for level, delay_ms in enumerate(config.levels.delays_ms, start=1):
                queue = MessageQueue(SCHEDULE_TOPIC, broker_name, level - 1)
                records, left = self._read(queue, delay_ms, left)
                yield from self._levels(records, query, config)

    # --- by key --------------------------------------------------------------------------------

    def ids_with_key(self, key: str) -> list[str] | None:
        """Return the ids of the delayed messages that have a key, or have it as their id; None if they are many."""
        found: dict[str, None] = {}
        for topic in (TIMER_TOPIC, SCHEDULE_TOPIC):
            for unique in (False, True):
                records = self._queries.messages_by_key(topic, key, _MOST_BY_KEY, unique=unique)
                if len(records) == _MOST_BY_KEY:
                    return None
                found.update(dict.fromkeys(record.msg_id for record in records if self.is_own(record)))
        return list(found)

    def newest_timers(self, key: str) -> list[MessageExt]:
        """Return the newest records with a key in the timer topic, pending or not; brokers return the newest first."""
        return self._queries.messages_by_key(TIMER_TOPIC, key, _MOST_BY_KEY)

    def timers_of(self, msg_id: str) -> list[MessageExt]:
        """Return the records of one message in the timer topic, pending or not, and the marks that delete them."""
        return self._queries.messages_by_key(TIMER_TOPIC, msg_id, _MOST_BY_KEY, unique=True)

    def levels_of(self, msg_id: str) -> list[tuple[MessageExt, int]]:
        """Return the records of one message in the topic of delay levels, pending or not, and when they are due."""
        records = self._queries.messages_by_key(SCHEDULE_TOPIC, msg_id, _MOST_BY_KEY, unique=True)
        return [(record, _level_due_ms(record, self._configs.of(record.broker_name))) for record in records]

    def _pending_of(self, ids: Iterable[str], query: PendingQuery) -> Iterator[tuple[TimerId, PendingMessage]]:
        for msg_id in ids:
            yield from self._timers(self.timers_of(msg_id), query)
            for record, _ in self.levels_of(msg_id):
                yield from self._levels([record], query, self._configs.of(record.broker_name))

    # --- records -------------------------------------------------------------------------------

    def _read(self, queue: MessageQueue, age_ms: int, left: int) -> tuple[Iterator[MessageExt], int]:
        """Return the records of a queue that are at most *age_ms* old, and how many more may be read after them."""
        end = self._queries.max_offset(queue)
        if end == 0:
            return iter(()), left
        start = self._queries.search_offset(queue, self._context.clock.now_ms() - age_ms - _SKEW_MS)
        left -= max(0, end - start)
        if left < 0:
            limit = self._context.settings.pending_read_limit
            raise BrokerError(
                f"more than {limit} delayed messages would be read to list those that are pending: broker "
                f"{queue.broker_name!r} alone has {end - start} in queue {queue.queue_id} of {queue.topic}; query by "
                "key, which uses the index, or raise mqtemplate.cluster.pending-read-limit"
            )
        return self._records(queue, start, end), left

    def _records(self, queue: MessageQueue, queue_offset: int, end: int) -> Iterator[MessageExt]:
        while queue_offset < end:
            try:
                result = self._queries.pull(queue, queue_offset, _PAGE, 0, None)
            except OffsetOutOfRangeError as exc:  # retention has deleted a file
                next_offset = exc.next_offset
            else:
                yield from result.messages
                next_offset = result.next_begin_offset
            if next_offset <= queue_offset:
                return
            queue_offset = next_offset

    def _timers(self, records: Iterable[MessageExt], query: PendingQuery) -> Iterator[tuple[TimerId, PendingMessage]]:
        now_ms = self._context.clock.now_ms()
        timers = TimerRecords[PendingMessage](lambda record: self._pending_message(record, timer_id(record).slot_ms))
        for record in records:
            due_ms = timer_id(record).slot_ms
            if due_ms > now_ms and (is_mark(record) or self._matches(record, due_ms, query)):
                timers.add(record)
        yield from timers.remaining().items()

    def _levels(
        self, records: Iterable[MessageExt], query: PendingQuery, config: DelayConfig
    ) -> Iterator[tuple[TimerId, PendingMessage]]:
        now_ms = self._context.clock.now_ms()
        for record in records:
            due_ms = _level_due_ms(record, config)
            if due_ms > now_ms and self._matches(record, due_ms, query):
                message = self._pending_message(record, due_ms)
                yield TimerId(record.broker_name, message.msg_id, due_ms), message

    def is_own(self, record: MessageExt) -> bool:
        """Return True if the message is for a topic of this client's namespace."""
        topic, namespace = record.properties.get(Property.REAL_TOPIC, ""), self._context.namespace
        return namespace.wrap(namespace.unwrap(topic)) == topic

    def _matches(self, record: MessageExt, due_ms: int, query: PendingQuery) -> bool:
        topic = self._context.namespace.unwrap(record.properties.get(Property.REAL_TOPIC, ""))
        return self.is_own(record) and query.matches(record, topic, record.msg_id, due_ms)

    def _pending_message(self, record: MessageExt, due_ms: int) -> PendingMessage:
        level = record.queue_id + 1 if record.topic == SCHEDULE_TOPIC else 0
        return PendingMessage(
            topic=self._context.namespace.unwrap(record.properties.get(Property.REAL_TOPIC, "")),
            msg_id=record.msg_id,
            tags=record.tags,
            keys=record.keys,
            deliver_ms=due_ms,
            delay_level=level,
            roll_count=parse_number(record.properties.get(Property.TIMER_ROLL_TIMES)) or 0,
            born_timestamp=record.born_timestamp,
            store_timestamp=record.store_timestamp,
            body_size=len(record.body),
            handle=level_handle(record, due_ms) if level else timer_handle(record),
            pending_key=record.properties.get(Property.PENDING_KEY),
        )


def sent_again(record: MessageExt, topic: str, slot_ms: int) -> Message:
    """Return the message of a delayed record, to send again with its id; 0 for a delivery now."""
    properties = {name: value for name, value in record.properties.items() if name not in _NOT_SENT_AGAIN}
    if slot_ms:
        properties[Property.TIMER_DELIVER_MS] = str(slot_ms + 1)
    return Message(topic, record.body, properties, record.flag)


def timer_handle(record: MessageExt) -> str:
    """Return the handle of a timer, the same that the broker has given to its producer."""
    # One more than the slot, as in RocketMQ: the broker rounds it down to the slot again.
    return encode_handle(_handle(record, timer_id(record).slot_ms + 1))


def level_handle(record: MessageExt, due_ms: int) -> str:
    """Return the handle of a message with a delay level. Unlike a timer's handle it has a physical offset."""
    return encode_handle(_handle(record, due_ms)._replace(physical_offset=record.physical_offset))


def _handle(record: MessageExt, due_ms: int) -> RecallHandle:
    return RecallHandle(record.properties.get(Property.REAL_TOPIC, ""), record.broker_name, due_ms, record.msg_id)


def _level_due_ms(record: MessageExt, config: DelayConfig) -> int:
    return record.store_timestamp + config.levels.delay_ms(record.queue_id + 1)


# --- states and cursors ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageState:
    """State of one message.

    Attributes:
        status: Result of a change if no timer of the message is pending.
        pending: Its pending timers with their records. There are two if a client stopped during a reschedule.
        handles: Handles of the pending timers. A message that is not in the index may have one without a record.
        deleted: Its timers that were recalled.
    """

    status: ScheduleChangeStatus
    pending: dict[TimerId, MessageExt] = field(default_factory=dict)
    handles: tuple[RecallHandle, ...] = ()
    deleted: frozenset[TimerId] = frozenset()

    @property
    def newest(self) -> MessageExt | None:
        """The record of the pending timer that was stored last."""
        return max(self.pending.values(), key=lambda record: record.store_timestamp, default=None)


def wrong_cursor(text: str) -> MessageError:
    return MessageError(f"{shown(text)} is not a cursor; pass PendingPage.cursor unchanged")


def position_of(timer: TimerId) -> tuple[int, str, str]:
    """Return the position of a message in the order of the pages; a cursor is the last one of a page."""
    return timer.slot_ms, timer.broker_name, timer.msg_id


def parse_cursor(cursor: str | None) -> tuple[int, str, str]:
    if cursor is None:
        return 0, "", ""
    due_ms, *names = cursor.split("/", 2)
    due = parse_number(due_ms)
    if due is None or len(names) != 2:
        raise wrong_cursor(cursor)
    return due, names[0], names[1]


def encode_cursor(cursors: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode()


def decode_cursor(text: str) -> dict[str, str]:
    """Return the cursor on each server.

    Raises:
        MessageError: *text* is not a cursor.
    """
    try:
        cursors = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (ValueError, RecursionError):  # includes the errors of Base64 and JSON
        cursors = None
    if not isinstance(cursors, dict) or not all(isinstance(cursor, str) for cursor in cursors.values()):
        raise wrong_cursor(text)
    return cursors
