"""Statistics for administration tools, from periodic samples and from the state of queues and groups, and requests of
administrators about the broker: runtime information, statistics and settings.

Source: RocketMQ ``broker: AdminBrokerProcessor``. ``mqadmin`` reads the values by these names.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.pop.pop import PopService
from mqtemplate.errors import ConfigurationError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import HistogramSnapshot
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import ConsumeStats, OffsetWrapper, QueueTimeSpan
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerStatsData,
    BrokerStatsItem,
    KVTable,
    TopicConfig,
    TopicOffset,
    TopicStatsTable,
)
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import GetBrokerConfigResponseHeader, ViewBrokerStatsDataRequestHeader
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.services import wall_time
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import SCHEDULE_TOPIC

_SECOND = 1_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE

_Key = tuple[str, ...]
_Counts = dict[_Key, int]

IN: _Key = ("in",)
"""Messages stored since the server started."""
OUT: _Key = ("out",)
"""Messages sent to consumers since the server started."""


class DayTotals(NamedTuple):
    """A count at the start of yesterday, at the start of today (local time), and now."""

    yesterday_morning: int
    today_morning: int
    now: int


class _CountSamples:
    """Samples of all counts at a fixed interval, the newest last."""

    def __init__(self, interval_ms: int, length: int) -> None:
        self._interval_ms = interval_ms
        self._samples: deque[tuple[int, _Counts]] = deque(maxlen=length)

    def add(self, now_ms: int, counts: _Counts) -> None:
        """Add a sample if the interval since the last one has passed."""
        if not self._samples or now_ms >= self._samples[-1][0] + self._interval_ms:
            self._samples.append((now_ms, counts))

    def growth(self, key: _Key, now_ms: int, count: int, span_ms: int) -> tuple[int, float]:
        """Return the growth of a count in the last *span_ms*, in total and per second.

        The span is shorter if the first sample is younger.
        """
        kept = [sample for sample in self._samples if sample[0] >= now_ms - span_ms - self._interval_ms // 2]
        since_ms, before = kept[0] if kept else (now_ms, {})
        if now_ms <= since_ms:
            return 0, 0.0
        growth = max(count - before.get(key, 0), 0)
        return growth, growth * _SECOND / (now_ms - since_ms)


class Traffic:
    """A `Service` that samples counts every ten seconds, so that no producer and no consumer pays for the statistics.

    The count of a topic is the sum of its queue lengths, and the count of a group is the sum of its offsets: nothing is
    counted for each message.
    """

    name = "server.traffic"
    _INTERVAL_MS = 10 * _SECOND

    def __init__(self, store: MessageStore, offsets: ConsumerOffsets, clock: Clock) -> None:
        self._store = store
        self._offsets = offsets
        self._clock = clock
        self._appended = store.metrics.counter("store.appended")
        self._pulled = store.metrics.counter("server.pulled")
        self._minute = _CountSamples(self._INTERVAL_MS, 7)
        self._hour = _CountSamples(10 * _MINUTE, 7)
        self._day = _CountSamples(4 * _HOUR, 7)
        self._keys: dict[_Key, _Key] = {}
        self._today: date | None = None
        self._mornings: tuple[_Counts, _Counts] = ({}, {})
        self._due_ms = 0
        self._first_end: int | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes appended to the commit log since the first sample."""
        return 0 if self._first_end is None else self._store.end_offset - self._first_end

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the samples are periodic."""

    def step(self) -> int | None:
        """Take a sample if one is due, and return the time of the next one."""
        now_ms = self._clock.steady_ms()
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + self._INTERVAL_MS
            self._sample(now_ms)
        return wall_time(self._clock, self._due_ms)

    def _sample(self, now_ms: int) -> None:
        if self._first_end is None:
            self._first_end = self._store.end_offset
        counts = self._counts()
        for samples in (self._minute, self._hour, self._day):
            samples.add(now_ms, counts)
        today = datetime.fromtimestamp(self._clock.now_ms() / _SECOND, UTC).astimezone().date()
        if today != self._today:
            self._mornings = (self._mornings[1], self._totals())
            self._today = today

    def _totals(self) -> _Counts:
        return {IN: self._appended.value, OUT: self._pulled.value}

    def _counts(self) -> _Counts:
        """Return the current counts. Samples share their keys, so that a sample of many topics needs little memory."""
        counts = self._totals()
        keys = self._keys
        for topic, end in self._store.topic_ends().items():
            key = ("topic", topic)
            counts[keys.get(key, key)] = end
        for (group, topic), offsets in self._offsets.all().items():
            group_key = ("group", group, topic)
            counts[keys.get(group_key, group_key)] = sum(offsets.values())
        self._keys = {each: each for each in counts}
        return counts

    def _topic_count(self, topic: str) -> int:
        return self._store.topic_ends().get(topic, 0)

    # --- queries -------------------------------------------------------------------------------

    def rates(self, key: _Key) -> tuple[float, float, float]:
        """Return the messages per second in the last ten seconds, minute and ten minutes: `IN` or `OUT`."""
        now_ms, count = self._clock.steady_ms(), self._totals()[key]
        return (
            self._minute.growth(key, now_ms, count, 10 * _SECOND)[1],
            self._minute.growth(key, now_ms, count, _MINUTE)[1],
            self._hour.growth(key, now_ms, count, 10 * _MINUTE)[1],
        )

    def totals(self, key: _Key) -> DayTotals:
        """Return the number of messages: `IN` or `OUT`."""
        yesterday, today = self._mornings
        return DayTotals(yesterday.get(key, 0), today.get(key, 0), self._totals()[key])

    def topic_rate(self, topic: str) -> float:
        """Return the messages stored in *topic* per second in the last minute."""
        return self._minute.growth(("topic", topic), self._clock.steady_ms(), self._topic_count(topic), _MINUTE)[1]

    def group_rate(self, group: str, topic: str) -> float:
        """Return the messages of *topic* that *group* consumed per second in the last minute."""
        count = sum(self._offsets.offsets(group, topic).values())
        return self._minute.growth(("group", group, topic), self._clock.steady_ms(), count, _MINUTE)[1]

    def topic_stats(self, topic: str) -> BrokerStatsData:
        """Return the messages stored in *topic* in the last minute, hour and day."""
        return self._stats(("topic", topic), self._topic_count(topic))

    def group_stats(self, group: str, topic: str) -> BrokerStatsData | None:
        """Return the messages of *topic* that *group* consumed. None if it never committed an offset."""
        offsets = self._offsets.offsets(group, topic)
        return self._stats(("group", group, topic), sum(offsets.values())) if offsets else None

    def _stats(self, key: _Key, count: int) -> BrokerStatsData:
        now_ms = self._clock.steady_ms()
        items = [
            BrokerStatsItem(sum=growth, tps=rate)
            for samples, span_ms in ((self._minute, _MINUTE), (self._hour, _HOUR), (self._day, 24 * _HOUR))
            for growth, rate in [samples.growth(key, now_ms, count, span_ms)]
        ]
        return BrokerStatsData(stats_minute=items[0], stats_hour=items[1], stats_day=items[2])


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Reads offsets and store times. It reads a few messages of each queue, so it must not run in the I/O thread."""

    raw: RawReader
    offsets: ConsumerOffsets
    traffic: Traffic
    pops: PopService
    broker_name: str

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """Return a queue of this broker."""
        return MessageQueue(topic, self.broker_name, queue_id)

    def topic_stats(self, config: TopicConfig) -> TopicStatsTable:
        """Return the offsets of each queue of a topic."""
        table = {}
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            last_ms = self._store_time(queue, high - 1) if high > low else 0
            table[queue] = TopicOffset(min_offset=low, max_offset=high, last_update_timestamp=last_ms)
        return TopicStatsTable(offset_table=table, topic_put_tps=self.traffic.topic_rate(config.topic_name))

    def consume_stats(self, group: str, topics: Iterable[TopicConfig]) -> ConsumeStats:
        """Return the progress of *group* in each queue of *topics*."""
        table, rate = {}, 0.0
        popped = {each.queue: each.next for each in self.pops.in_flight(group)}
        for config in topics:
            rate += self.traffic.group_rate(group, config.topic_name)
            for queue_id in range(config.read_queue_nums):
                queue = self.queue(config.topic_name, queue_id)
                table[queue] = self._progress(group, queue, popped.get(queue, 0))
        return ConsumeStats(offset_table=table, consume_tps=rate)

    def _progress(self, group: str, queue: MessageQueue, popped: int) -> OffsetWrapper:
        """Return the progress in one queue.

        Args:
            popped: Next queue offset to pop. Tools show the messages between it and the committed offset as in flight.
        """
        consumed = self.offsets.offset(group, queue.topic, queue.queue_id) or 0
        return OffsetWrapper(
            broker_offset=self.raw.reader.max_offset(queue),
            consumer_offset=consumed,
            pull_offset=max(consumed, popped),
            last_timestamp=self._store_time(queue, consumed - 1) if consumed > 0 else 0,
        )

    def time_spans(self, group: str, config: TopicConfig) -> list[QueueTimeSpan]:
        """Return the store times of the first, the last and the consumed message of each queue.

        The delay time is the age (ms) of the next message that *group* has not consumed.
        """
        spans, now_ms = [], self.raw.store.clock.now_ms()
        for queue_id in range(config.write_queue_nums):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            consumed = self.offsets.offset(group, config.topic_name, queue_id)
            next_ms = self._store_time(queue, consumed) if consumed is not None and consumed < high else 0
            spans.append(
                QueueTimeSpan(
                    message_queue=queue,
                    min_time_stamp=self._store_time(queue, low) if high > low else 0,
                    max_time_stamp=self._store_time(queue, high - 1) if high > low else 0,
                    consume_time_stamp=self._store_time(queue, consumed - 1) if consumed else 0,
                    delay_time=max(now_ms - next_ms, 0) if next_ms else 0,
                )
            )
        return spans

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the first queue offset stored at *timestamp* (ms) or later, or the maximum offset.

        A negative timestamp stands for the maximum offset.
        """
        return self.raw.reader.max_offset(queue) if timestamp < 0 else self.raw.reader.search_offset(queue, timestamp)

    def span(self, queue: MessageQueue) -> tuple[int, int]:
        """Return the first queue offset, and the queue offset of the next message."""
        return self.raw.reader.min_offset(queue), self.raw.reader.max_offset(queue)

    def _store_time(self, queue: MessageQueue, queue_offset: int) -> int:
        """Return when (ms) a message was stored, or 0 if it was deleted or is corrupt."""
        return self.raw.store_time(queue, queue_offset) or 0


_log = get_logger("mqtemplate.admin")

Reload = Callable[[str], ReloadedConfig]
"""Reads the configuration of a server again, for a reason."""

# RocketMQ: StoreStatsService.PUT_MESSAGE_ENTIRE_TIME_MAX_DESC -> upper bound in ms
_APPEND_TIMES = {
    "<=0ms": 1,
    "0~10ms": 10,
    "10~50ms": 50,
    "50~100ms": 100,
    "100~200ms": 200,
    "200~500ms": 500,
    "500ms~1s": 1_000,
    "1~2s": 2_000,
    "2~3s": 3_000,
    "3~4s": 4_000,
    "4~5s": 5_000,
    "5~10s": 10_000,
    "10s~": math.inf,
}

_DELAY_LEVELS = "messageDelayLevel"
"""The only setting that this request changes. The engine stores the change, so it survives a restart."""

_QUEUES = [f"{name}ThreadPoolQueue" for name in ("send", "pull", "query", "litePull", "ack")]
_CONSTANTS = {
    # RocketMQ's broker has thread pools, and services that may lag behind the log. This broker has neither.
    **{f"{queue}{value}": "0" for queue in _QUEUES for value in ("Size", "Capacity", "HeadWaitTimeMills")},
    **dict.fromkeys(("dispatchBehindBytes", "pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind"), "0"),
    **dict.fromkeys(("EndTransactionQueueSize", "EndTransactionThreadPoolQueueCapacity", "dispatchMaxBuffer"), "0"),
    **dict.fromkeys(("getMessageEntireTimeMax", "remainTransientStoreBufferNumbs", "timerCongestNum"), "0"),
    "timerEnqueueTps": "0.0",
    "timerDequeueTps": "0.0",
}
"""Values that tools read and that are constant here."""


@dataclass(frozen=True, slots=True)
class BrokerAdminProcessor:
    """Processors of requests about the broker.

    Attributes:
        address: Returns the address that clients connect to.
        boot_ms: When the server was created.
        reload: Reads the configuration of the server again. The argument is the reason, for the log.
    """

    engine: Engine
    settings: BrokerServerSettings
    topics: TopicConfigs
    traffic: Traffic
    address: Callable[[], str]
    boot_ms: int
    reload: Reload

    # --- runtime information -------------------------------------------------------------------

    @answers(RequestCode.GET_BROKER_RUNTIME_INFO, slow=True)
    def _runtime_info(self) -> KVTable:
        """Return the values that tools show."""
        boot_ms, version, traffic = str(self.boot_ms), CURRENT_VERSION, self.traffic
        rates_out = _rates_text(traffic.rates(OUT))
        info = {
            "brokerActive": "true",
            "brokerVersion": str(int(version)),
            "brokerVersionDesc": version.name,
            "bootTimestamp": boot_ms,
            "startAcceptSendRequestTimeStamp": boot_ms,
            "runtime": _duration_text(self.engine.clock.now_ms() - self.boot_ms),
            "putTps": _rates_text(traffic.rates(IN)),
            "getTransferredTps": rates_out,
            "getTotalTps": rates_out,
            "getFoundTps": rates_out,
            "getMissTps": "0.0 0.0 0.0",
            **_day_totals("msgPutTotal", traffic.totals(IN)),
            **_day_totals("msgGetTotal", traffic.totals(OUT)),
            **self._store_info(),
            **self._append_info(),
            **self._level_info(),
            **_CONSTANTS,
        }
        return KVTable(table=dict(sorted(info.items())))

    def _store_info(self) -> dict[str, str]:
        store = self.engine.store
        return {
            "commitLogMinOffset": str(store.start_offset),
            "commitLogMaxOffset": str(store.end_offset),
            "remainHowManyDataToFlush": f"{max(store.end_offset - store.confirm_offset, 0)} B",
            "earliestMessageTimeStamp": str(self._earliest_ms()),
            **self._disk_info(),
        }

    def _level_info(self) -> dict[str, str]:
        """Return for each used delay level the offset of its first pending message, and the end of its queue."""
        store = self.engine.store
        return {
            f"scheduleMessageOffset_{level}": f"{position},{store.consume_queue(SCHEDULE_TOPIC, level - 1).max_offset}"
            for level, position in self.engine.delayed.level_positions().items()
        }

    def _append_info(self) -> dict[str, str]:
        """Return the counts and times of appends since the start. The exporter for Prometheus requires each."""
        metrics = self.engine.store.metrics
        count, size = metrics.counter("store.appended").value, self.traffic.stored_bytes
        times_ns = metrics.histogram("store.append_ns").snapshot()
        return {
            "putMessageTimesTotal": str(count),
            "putMessageSizeTotal": str(size),
            "putMessageAverageSize": str(size / max(count, 1)),
            "putMessageEntireTimeMax": str(times_ns.quantile(1) // 1_000_000),
            "putMessageDistributeTime": _distribution_text(times_ns),
            "putLatency99": f"{times_ns.quantile(0.99) / 1e6:.2f}",
            "putLatency999": f"{times_ns.quantile(0.999) / 1e6:.2f}",
        }

    def _disk_info(self) -> dict[str, str]:
        usage = self.engine.store.store_files.disk_usage()
        used, free = (0, 0) if usage is None else (usage.used, usage.free)
        ratio = f"{0.0 if usage is None else usage.used_ratio:.4f}"
        return {
            "commitLogDiskRatio": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {_bytes_text(used + free)}, Free : {_bytes_text(free)}.",
        }

    def _earliest_ms(self) -> int:
        """Return when the first message in the log was stored, or -1 for an empty log."""
        store = self.engine.store
        try:
            record = store.read_at(store.start_offset) if store.start_offset < store.confirm_offset else None
        except CorruptRecordError:
            return -1
        return -1 if record is None else record.store_timestamp

    @answers(RequestCode.VIEW_BROKER_STATS_DATA)
    def _stats(self, query: ViewBrokerStatsDataRequestHeader) -> BrokerStatsData:
        found: BrokerStatsData | None = None
        name, key = query.stats_name, query.stats_key
        if name == "TOPIC_PUT_NUMS":
            if self.topics.find(key) is not None:
                found = self.traffic.topic_stats(key)
        elif name == "GROUP_GET_NUMS":
            topic, _, group = key.rpartition("@")
            found = self.traffic.group_stats(group, topic)
        if found is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"no statistics {name!r} of {key!r}")
        return found

    # --- settings ------------------------------------------------------------------------------

    @answers(RequestCode.GET_BROKER_CONFIG)
    def _config(self) -> tuple[GetBrokerConfigResponseHeader, bytes]:
        text = "".join(f"{name}={value}\n" for name, value in sorted(self.config().items()))
        version = json.dumps({"counter": 0, "stateVersion": 0, "timestamp": self.boot_ms})
        return GetBrokerConfigResponseHeader(version=version), text.encode()

    def config(self) -> dict[str, str]:
        """Return the settings by RocketMQ's names. None of them is secret."""
        broker, server = self.engine, self.settings
        engine, store = broker.settings, broker.store
        ip, _, port = self.address().rpartition(":")
        values: dict[str, object] = {
            "brokerClusterName": server.cluster_name,
            "brokerName": broker.name,
            "brokerId": 0,
            "brokerIP1": ip,
            "listenPort": port,
            "brokerPermission": 6,
            "brokerRole": "ASYNC_MASTER",
            "autoCreateTopicEnable": self.topics.auto_create,
            "autoCreateSubscriptionGroup": server.auto_create_subscription_group,
            "defaultTopicQueueNums": server.default_topic_queue_nums,
            "enablePropertyFilter": server.enable_property_filter,
            "recallMessageEnable": server.recall_message_enable,
            "regionId": server.region_id,
            "storePathRootDir": broker.path or "memory",
            "flushDiskType": engine.flush_disk_type.value,
            "flushConsumerOffsetInterval": engine.flush_consumer_offset_interval_ms,
            "mappedFileSizeCommitLog": store.sizes.commit_log,
            "mappedFileSizeConsumeQueue": store.sizes.consume_queue,
            "mappedFileSizeTimerLog": broker.delayed.timers.log_file_size,
            "maxHashSlotNum": store.index.geometry.slots,
            "maxIndexNum": store.index.geometry.units,
            "maxMessageSize": engine.max_message_size,
            _DELAY_LEVELS: broker.levels.text,
            "timerWheelEnable": engine.timer_wheel_enable,
            "timerPrecisionMs": engine.timer_precision_ms,
            "timerMaxDelaySec": engine.timer_max_delay_sec,
            "timerRollWindowSlot": engine.timer_roll_window_slot,
            "topicShapes": json.dumps({topic: each.describe() for topic, each in engine.topic_shapes.items()}),
            "fileReservedTime": engine.file_reserved_time,
            "deleteWhen": engine.delete_when,
            "diskMaxUsedSpaceRatio": engine.disk_max_used_space_ratio,
        }
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}

    @answers(RequestCode.UPDATE_BROKER_CONFIG, slow=True)
    def _update_config(self, connection: Connection, request: RemotingCommand) -> None:
        """Change settings: all of the requested ones or none."""
        requested = _parse_properties(request.body.decode("utf-8", "replace"))
        config = self.config()
        fixed = [name for name, value in requested.items() if name != _DELAY_LEVELS and config.get(name) != value]
        if fixed:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"{', '.join(fixed)} cannot be changed by this request, only {_DELAY_LEVELS} can; change "
                "application.yml, and let the broker read it: mqtemplate reload says which keys need a restart",
            )
        if _DELAY_LEVELS in requested:
            try:
                self.engine.change_delay_levels(requested[_DELAY_LEVELS])
            except ConfigurationError as exc:
                raise RefusedError(ResponseCode.INVALID_PARAMETER, str(exc)) from exc
        _log.info("admin.config_updated", names=sorted(requested), by=str(connection.remote))

    @answers(RequestCode.RELOAD_CONFIG, slow=True)
    def _reload(self, connection: Connection) -> ReloadedConfig:
        return self.reload(f"request of {connection.remote}")


def _parse_properties(text: str) -> dict[str, str]:
    """Parse lines ``name=value`` of a Java properties file."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith(("#", "!"))]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _distribution_text(times_ns: HistogramSnapshot) -> str:
    """Return how many appends took how long, as RocketMQ's ``StoreStatsService`` does. An append of a bucket counts as
    one of its upper bound.
    """
    counts = dict.fromkeys(_APPEND_TIMES, 0)
    for bound_ns, count in times_ns.buckets.items():
        name = next(name for name, limit_ms in _APPEND_TIMES.items() if bound_ns <= limit_ms * 1_000_000)
        counts[name] += count
    return " ".join(f"[{name}]:{count}" for name, count in counts.items())


def _rates_text(rates: tuple[float, float, float]) -> str:
    return " ".join(str(round(rate, 4)) for rate in rates)


def _day_totals(name: str, totals: DayTotals) -> dict[str, str]:
    moments = ("YesterdayMorning", "TodayMorning", "TodayNow")
    return {f"{name}{moment}": str(total) for moment, total in zip(moments, totals, strict=True)}


def _duration_text(milliseconds: int) -> str:
    minutes, seconds = divmod(milliseconds // 1_000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1_024:
            return f"{count:.1f} {unit}"
        count /= 1_024
    return f"{count:.1f} TiB"
