"""Reads the system topics of a RocketMQ cluster into an index of its pending messages, and the state of its brokers.

A broker has no request that lists its pending messages. Its system topics have a record for each delayed message,
delivered or not. `IndexReader` pulls each record once, and `PendingIndex` keeps what is still due, without the bodies.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from mqtemplate.broker import DelayConsole
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID
from mqtemplate.brokers.remote.delayed.backlog import DelayConfig, DelayConfigs, TimerId, is_mark, timer_id
from mqtemplate.brokers.remote.delayed.index import (
    IndexedMessage,
    IndexedSource,
    IndexFilter,
    IndexPosition,
    PendingIndex,
)
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.errors import BrokerError, OffsetOutOfRangeError, RemoteTimeoutError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.numbers import parse_number
from mqtemplate.pending import BrokerDelays, IndexState, LevelBacklog, PendingCounts, PendingPage, PendingQuery
from mqtemplate.remoting.protocol.bodies.route import KVTable
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_log = get_logger("mqtemplate.remote")

# --- reading of the brokers -------------------------------------------------------------------------

_PAGE = 256  # a broker returns 32 of them by default
_BATCH = 2_000
_SKEW_MS = 60_000
_FRESH_MS = 1_000
"""Time after which new records are requested again."""
_DAY_MS = 86_400_000


class _SourcePart(NamedTuple):
    """Records of a source to read: from a position to an end that was current before."""

    source: IndexedSource
    queue: MessageQueue
    config: DelayConfig
    position: IndexPosition
    end: int


class _IndexBatch:
    """Records that are added to the file together.

    Attributes:
        after: The position after them.
    """

    def __init__(self, position: IndexPosition) -> None:
        self.after = position
        self.record_count = 0
        self.messages: list[IndexedMessage] = []
        self.marks: list[tuple[int, str]] = []

    def add(self, records: Sequence[MessageExt], config: DelayConfig, now_ms: int) -> None:
        """Add the messages that are due later than now, and the timers that markers delete."""
        self.record_count += len(records)
        for record in records:
            timer = None if record.topic == SCHEDULE_TOPIC else timer_id(record)
            if timer is None:
                due_ms = record.store_timestamp + config.levels.delay_ms(record.queue_id + 1)
            else:
                due_ms = timer.slot_ms
            if due_ms > now_ms and timer is not None and is_mark(record):
                self.marks.append((due_ms, timer.msg_id))
            elif due_ms > now_ms:
                self.messages.append(IndexedMessage.of(record, due_ms))
        if records:
            last = records[-1]
            self.after = IndexPosition(self.after.next_offset, last.physical_offset, last.store_timestamp)


class IndexReader:
    """Reads the records that brokers have stored since the last call into the index.

    - Each record is pulled once, from a replica if there is one that allows it, so that masters are spared.
    - At most ``pending_read_rate`` records a second, over all brokers.
    - Another store under the old name is noticed by the last record that was read.
    """

    def __init__(self, context: ClientContext, queries: Queries, configs: DelayConfigs, index: PendingIndex) -> None:
        self._context = context
        self._queries = queries
        self._configs = configs
        self.index = index
        self._lock = threading.Lock()
        self._read_ms: int | None = None
        self._checked: set[IndexedSource] = set()
        self._not_by_replica: set[str] = set()
        self._notes: dict[str, str] = {}
        self._read = self._total = 0

    def state(self) -> IndexState:
        """Return how far the brokers were read."""
        return IndexState(
            path=str(self.index.path),
            size=self.index.size,
            read=self._read,
            total=max(self._read, self._total),
            is_complete=self._read_ms is not None,
            notes=tuple(self._notes.values()),
        )

    def update(self, on_read: Callable[[int], None] | None = None) -> None:
        """Read until the end, unless that was done within the last second.

        Args:
            on_read: Called with the number of records read since the last call. Without it there is a time limit.

        Raises:
            RemoteTimeoutError: The time limit is over. The next call goes on there.
            BrokerError: A broker refuses a read, or does not answer.
        """
        clock = self._context.clock
        limit_s = -1 if on_read is not None else self._context.settings.pull_timeout_ms / 1_000
        if not self._lock.acquire(timeout=limit_s):
            raise self._timeout()
        try:
            now_ms = clock.steady_ms()
            if self._read_ms is not None and now_ms - self._read_ms < _FRESH_MS:
                return
            self._read_all(on_read, None if on_read is not None else now_ms + round(limit_s * 1_000))
            self._read_ms = clock.steady_ms()
        finally:
            self._lock.release()

    def _timeout(self) -> RemoteTimeoutError:
        return RemoteTimeoutError(
            f"the index of pending messages is not complete: {self._read:,} of {self._total:,} records were read; try "
            "again, or pass on_compared, which is called with the progress and has no time limit"
        )

    def _read_all(self, on_read: Callable[[int], None] | None, until_ms: int | None) -> None:
        plan = [part for source, age_ms, config in self._sources() if (part := self._part(source, age_ms, config))]
        self._read, self._total = 0, sum(part.end - part.position.next_offset for part in plan)
        started_ms, rate = self._context.clock.steady_ms(), self._context.settings.pending_read_rate
        for part in plan:
            for count in self._read_part(part):
                self._read += count
                if on_read is not None:
                    on_read(count)
                now_ms = self._context.clock.steady_ms()
                if until_ms is not None and now_ms > until_ms:
                    raise self._timeout()
                ahead_s = self._read / rate - (now_ms - started_ms) / 1_000
                if ahead_s > 0:
                    self._context.clock.sleep(ahead_s)
        self.index.remove_due(self._context.clock.now_ms())

    def _sources(self) -> Iterator[tuple[IndexedSource, int, DelayConfig]]:
        """Yield the queues, and the age of the oldest record in it that may be pending."""
        for name in self._context.routes.master_names():
            config = self._config(name)
            if config.slot_ms is not None:
                yield IndexedSource(name, TIMER_TOPIC, 0), config.timer_age_ms, config
            for level, delay_ms in enumerate(config.levels.delays_ms, start=1):
                yield IndexedSource(name, SCHEDULE_TOPIC, level - 1), delay_ms, config

    def _config(self, broker_name: str) -> DelayConfig:
        """Return the settings of a broker; RocketMQ's defaults for an account that may not read them."""
        try:
            return self._configs.of(broker_name)
        except BrokerError as exc:
            if not self._notes:
                _log.info("remote.broker_config_refused", broker=broker_name, reason=str(exc))
            self._notes[broker_name] = (
                f"broker {broker_name} does not report its settings ({exc}); its delay levels are taken from "
                "mqtemplate.broker.message-delay-level, and its timers from RocketMQ's defaults"
            )
            levels = DelayLevels.parse(self._context.settings.message_delay_level)
            return DelayConfig(levels, 1_000, 2 * _DAY_MS, 3 * _DAY_MS)

    def _part(self, source: IndexedSource, age_ms: int, config: DelayConfig) -> _SourcePart | None:
        """Return the records of a source to read; None if there are none."""
        queue = MessageQueue(source.topic, source.broker_name, source.queue_id)
        position, end = self.index.position(source), self._queries.max_offset(queue)
        if position is not None and source not in self._checked and not self._is_same(queue, position, end):
            _log.warning("remote.pending_index_reset", broker=source.broker_name, topic=source.topic)
            self.index.remove_broker(source.broker_name)
            position = None
        self._checked.add(source)
        if position is None:
            start_ms = self._context.clock.now_ms() - age_ms - _SKEW_MS
            position = IndexPosition(self._queries.search_offset(queue, start_ms) if end else 0)
            self.index.add(source, None, position, ())
        return _SourcePart(source, queue, config, position, end) if position.next_offset < end else None

    def _is_same(self, queue: MessageQueue, position: IndexPosition, end: int) -> bool:
        """Return False if the broker has another record where the last one was read, or none."""
        if end < position.next_offset:
            return False
        if position.physical_offset < 0:
            return True
        try:
            found = self._queries.pull(queue, position.next_offset - 1, 1).messages
        except OffsetOutOfRangeError:  # retention has deleted it
            return True
        return not found or (found[0].physical_offset, found[0].store_timestamp) == position[1:]

    def _read_part(self, part: _SourcePart) -> Iterator[int]:
        """Yield the number of records of each batch that was added."""
        position = part.position
        while position.next_offset < part.end:
            batch = self._batch(part, position)
            if batch.after.next_offset <= position.next_offset:
                return
            if not self.index.add(part.source, position, batch.after, batch.messages, batch.marks):
                return  # another process reads into this file, too: the next call goes on where it stands
            yield batch.after.next_offset - position.next_offset
            position = batch.after

    def _batch(self, part: _SourcePart, position: IndexPosition) -> _IndexBatch:
        """Return what the records of several pulls say; their bodies are dropped after each pull."""
        batch, broker_name = _IndexBatch(position), part.queue.broker_name
        most = min(_BATCH, self._context.settings.pending_read_rate)  # the rate is kept between batches
        while batch.after.next_offset < part.end and batch.record_count < most:
            offset, count = batch.after.next_offset, min(_PAGE, most - batch.record_count)
            try:
                result = self._queries.pull(part.queue, offset, count, broker_id=self._replica(broker_name))
            except OffsetOutOfRangeError as exc:  # retention has deleted a file
                following = exc.next_offset
            else:
                batch.add(result.messages, part.config, self._context.clock.now_ms())
                following = result.next_begin_offset
            if following > offset:
                batch.after = batch.after._replace(next_offset=following)
            elif self._replica(broker_name) != MASTER_ID:  # it is behind its master, or slaveReadEnable is off
                self._not_by_replica.add(broker_name)
            else:
                break
        return batch

    def _replica(self, broker_name: str) -> int:
        """Return the id of a replica to read from; the master's if there is none, or it does not allow it."""
        if broker_name in self._not_by_replica:
            return MASTER_ID
        return max(self._context.routes.brokers().get(broker_name, ()), default=MASTER_ID)

    # --- queries -------------------------------------------------------------------------------

    def page(
        self, query: PendingQuery, after: tuple[int, str, str], max_count: int, is_gone: Callable[[TimerId], bool]
    ) -> PendingPage:
        """Return the messages after a position that are due later than now.

        Args:
            is_gone: Returns True for a message to leave out: its delete marker cannot be read yet.
        """
        found = self.index.page(self._filter_of(query), after, max_count + 1)
        last = found[max_count - 1] if len(found) > max_count else None
        cursor = None if last is None else f"{last.due_ms}/{last.broker_name}/{last.msg_id}"
        unwrap = self._context.namespace.unwrap
        shown = (each for each in found[:max_count] if not is_gone(TimerId(each.broker_name, each.msg_id, each.due_ms)))
        return PendingPage(tuple(each.message(unwrap) for each in shown), cursor)

    def counts(self, query: PendingQuery, bucket_ms: int) -> PendingCounts:
        """Return the numbers of the messages that are due later than now."""
        return self.index.counts(self._filter_of(query), bucket_ms)

    def _filter_of(self, query: PendingQuery) -> IndexFilter:
        namespace = self._context.namespace
        topics = None if query.topic is None else [namespace.wrap(query.topic)]
        if topics is None and self._context.settings.namespace:
            topics = [name for name in self.index.topics() if namespace.wrap(namespace.unwrap(name)) == name]
        after_ms = max(self._context.clock.now_ms() + 1, query.after_ms or 0)
        return IndexFilter(topics, query.tag, after_ms, query.before_ms)


def index_answers(query: PendingQuery) -> bool:
    """Return True if the file has what a query compares. It has no properties; a key is in the index of the broker."""
    return query.key is None and query.with_property is None


class ClusterDelayConsole(DelayConsole):
    """Implementation for brokers of RocketMQ."""

    def __init__(
        self, context: ClientContext, queries: Queries, configs: DelayConfigs, reader: IndexReader | None
    ) -> None:
        self._context = context
        self._queries = queries
        self._configs = configs
        self._reader = reader

    def index_state(self) -> IndexState | None:
        return None if self._reader is None else self._reader.state()

    def update_index(self, on_read: Callable[[int], None] | None = None) -> None:
        if self._reader is not None:
            self._reader.update(on_read)

    def totals(self, column: Literal["topic", "level"]) -> dict[str, int]:
        if self._reader is None:
            return {}
        unwrap = self._context.namespace.unwrap
        found = self._reader.index.totals(self._context.clock.now_ms(), column)
        return {unwrap(name): count for name, count in found.items()}

    def brokers(self) -> Sequence[BrokerDelays]:
        names = self._context.routes.master_names()
        return [read_broker_delays(self._context, self._queries, self._configs, name) for name in names]


# --- state of the delay services ------------------------------------------------------------------


_LEVEL_PREFIX = "scheduleMessageOffset_"
_JAVA_INT_MAX = (1 << 31) - 1
"""``timerCongestNumEachSlot`` of a broker without a limit."""


def read_broker_delays(
    context: ClientContext, queries: Queries, configs: DelayConfigs, broker_name: str
) -> BrokerDelays:
    """Return what a broker reports about its delay services, and how late its levels are.

    Source: RocketMQ ``broker: AdminBrokerProcessor.prepareRuntimeInfo``, ``ScheduleMessageService.buildRunningStats``.
    """
    request = RemotingCommand.request(RequestCode.GET_BROKER_RUNTIME_INFO)
    try:
        address = context.routes.address(broker_name)
        response = context.call(address, request, f"get the state of broker {broker_name!r}")
        info = KVTable.decode(response.body).table
    except BrokerError as exc:
        return BrokerDelays(broker=broker_name, problem=str(exc))
    config = _config_or_none(configs, broker_name)
    limit = None if config is None else config.most_in_slot
    offsets = dict[int, tuple[int, int]]()
    for name, value in info.items():
        if re.fullmatch(rf"{_LEVEL_PREFIX}\d+", name) and (found := re.fullmatch(r"(\d+),(\d+)", value)):
            offsets[int(name.removeprefix(_LEVEL_PREFIX))] = int(found[1]), int(found[2])
    for level in range(1, 1 + (0 if config is None else config.levels.max_level)):
        if level not in offsets:  # RocketMQ 4 leaves a level out until its first delivery
            offsets[level] = (0, _end_or_0(queries, MessageQueue(SCHEDULE_TOPIC, broker_name, level - 1)))
    return BrokerDelays(
        broker=broker_name,
        has_timers="timerReadBehind" in info and (config is None or config.slot_ms is not None),
        timer_behind_ms=max(0, parse_number(info.get("timerReadBehind")) or 0) * 1_000,
        timer_unread=max(0, parse_number(info.get("timerOffsetBehind")) or 0),
        timer_pending=max(0, parse_number(info.get("timerCongestNum")) or 0),
        put_rate=_rate(info.get("timerEnqueueTps")),
        delivered_rate=_rate(info.get("timerDequeueTps")),
        most_in_slot=None if limit is None or limit >= _JAVA_INT_MAX else limit,
        levels=tuple(
            _level_state(context, queries, config, MessageQueue(SCHEDULE_TOPIC, broker_name, level - 1), *span)
            for level, span in sorted(offsets.items())
            if span != (0, 0)
        ),
    )


def _end_or_0(queries: Queries, queue: MessageQueue) -> int:
    try:
        return queries.max_offset(queue)
    except BrokerError:  # an account may not read it
        return 0


def _config_or_none(configs: DelayConfigs, broker_name: str) -> DelayConfig | None:
    try:
        return configs.of(broker_name)
    except BrokerError:  # access control may forbid the request
        return None


def _rate(text: str | None) -> float:
    """Return a rate of a broker; 0 for text that is none, such as ``NaN``."""
    return float(text) if text is not None and re.fullmatch(r"\d+(\.\d+)?(E\d)?", text) else 0.0


def _level_state(
    context: ClientContext, queries: Queries, config: DelayConfig | None, queue: MessageQueue, position: int, end: int
) -> LevelBacklog:
    level, late_ms = queue.queue_id + 1, None
    delays_ms = () if config is None else config.levels.delays_ms
    delay_ms = delays_ms[level - 1] if level <= len(delays_ms) else None
    if position >= end:
        late_ms = 0
    elif delay_ms is not None:
        try:
            first = queries.pull(queue, position, 1).messages
        except BrokerError:  # an account may not read it, or retention has deleted the record
            first = []
        late_ms = max(0, context.clock.now_ms() - first[0].store_timestamp - delay_ms) if first else None
    return LevelBacklog(level=level, delay_ms=delay_ms, pending=max(0, end - position), late_ms=late_ms)
