"""The exported metrics: their names by OpenTelemetry's conventions, kinds, units and descriptions.

This is the only place with these names. Exporters read it, and the tests compare it with the documentation, the
dashboards and the alert rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from mqtemplate.metrics import HistogramSnapshot, MetricKind, MetricSample

_SYSTEM = {"messaging.system": "rocketmq"}

_ATTRIBUTES = {
    # label -> attribute of OpenTelemetry's conventions; other labels are attributes of this library
    "topic": "messaging.destination.name",
    "queue": "messaging.destination.partition.id",
    "group": "messaging.consumer.group.name",
    "error": "error.type",
}
_PREFIX = "mqtemplate."

_SUFFIXES = {"_ns": ("s", 1e-9), "_ms": ("s", 1e-3)}
"""Suffix of the name of a metric -> unit and factor of the exported one."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One exported metric.

    Attributes:
        name: Name by OpenTelemetry's conventions, such as ``messaging.process.duration``.
        unit: ``s``, ``1``, ``By``, or what is counted, such as ``{message}``.
        factor: Factor from a value to an exported one.
        attributes: Attributes that each series has.
    """

    source: str
    name: str
    kind: MetricKind
    unit: str
    description: str
    factor: float = 1
    attributes: Mapping[str, str] | None = None

    @property
    def prometheus_name(self) -> str:
        """Name for Prometheus, without the suffixes ``_total``, ``_bucket``, ``_sum`` and ``_count``."""
        seconds = "_seconds" if self.unit == "s" else "_ratio" if self.unit == "1" else ""
        return self.name.replace(".", "_") + seconds

    @property
    def prometheus_names(self) -> tuple[str, ...]:
        """Names of the series for Prometheus."""
        name = self.prometheus_name
        if self.kind is MetricKind.COUNTER:
            return (f"{name}_total",)
        if self.kind is MetricKind.HISTOGRAM:
            return (f"{name}_bucket", f"{name}_count", f"{name}_sum")
        return (name,)


@dataclass(frozen=True, slots=True)
class Point:
    """One exported value.

    Attributes:
        value: A number, in the unit of the instrument; a histogram in the unit of its source.
    """

    instrument: Instrument
    value: float | HistogramSnapshot
    attributes: Mapping[str, str]


def _instrument(
    kind: MetricKind,
    source: str,
    unit: str,
    description: str,
    name: str = "",
    attributes: Mapping[str, str] | None = None,
) -> Instrument:
    suffix = source[-3:] if source[-3:] in _SUFFIXES else ""
    unit, factor = _SUFFIXES.get(suffix, (unit, 1.0))
    chosen = name or _PREFIX + source.removesuffix(suffix)
    return Instrument(source, chosen, kind, unit, description, factor, attributes)


_counter = partial(_instrument, MetricKind.COUNTER)
_gauge = partial(_instrument, MetricKind.GAUGE)


def _histogram(
    source: str, description: str, name: str = "", attributes: Mapping[str, str] | None = None
) -> Instrument:
    return _instrument(MetricKind.HISTOGRAM, source, "s", description, name, attributes)


_SEND = _SYSTEM | {"messaging.operation.name": "send"}
_PROCESS = _SYSTEM | {"messaging.operation.name": "process"}

INSTRUMENTS: tuple[Instrument, ...] = (
    # --- sends and handlers of this process
    _counter("client.send.messages", "{message}", "Messages sent, failed sends included",
             "messaging.client.sent.messages", attributes=_SEND),
    _histogram("client.send.duration_ns", "Duration of a send",
               "messaging.client.operation.duration", attributes=_SEND),
    _counter("client.send.errors", "{message}", "Messages whose send failed, by error"),
    _counter("listener.handle.messages", "{message}", "Messages that handlers were called with",
             "messaging.client.consumed.messages", attributes=_PROCESS),
    _histogram("listener.handle.duration_ns", "Duration of a call of a handler", "messaging.process.duration",
               attributes=_PROCESS),
    _counter("listener.handle.errors", "{message}", "Messages that failed, by error"),
    _counter("listener.failed", "{message}", "Messages that failed, by what became of them"),
    _gauge("listener.running", "1", "1 while the listener is a member of its group"),
    _gauge("listener.paused", "1", "1 while the listener is paused"),
    _gauge("listener.in_flight", "{message}", "Messages that were fetched and are not finished"),
    _gauge("listener.concurrency", "{call}", "Most calls of the handler that run at a time; hanging ones come on top"),
    _gauge("listener.hanging", "{call}", "Calls of the handler that run longer than its consume-timeout"),
    _counter("listener.renewed", "{message}", "By POP: renewals of invisible times since the start of the listener"),
    _counter("listener.expired", "{message}", "By POP: messages whose invisible time was over before they were done"),
    _gauge("worker.up", "1", "1 while a process of an application with several ones answers"),
    _gauge("group.lag", "{message}", "Messages after the committed offset of a group, by queue"),
    _gauge("group.committed", "{message}", "Committed offset of a group, by queue; it stands if nothing is consumed"),
    _gauge("group.behind_ms", "s", "Age of the oldest message of a topic that a group has not consumed"),
    _gauge("group.dead_letters", "{message}", "Dead letters of a group, by what an operator did with them"),
    _gauge("clock.now_ms", "s", "Time of the clock of this process, to be compared with Prometheus' own"),
    _gauge("clock.ahead_ms", "s", "Least time by which the clock of a producer is ahead of the broker's"),
    _gauge("clock.behind_ms", "s", "Least time by which the clock of this process is behind the broker's"),
    # --- lateness
    _histogram("lateness.delivery_ms", "Time from the deliver time of a message to the call of its handler"),
    _counter("lateness.caused_ms", "s", "Sum of the lateness of deliveries, by cause"),
    # --- delayed messages of the broker in this process
    _gauge("delay.pending", "{message}", "Pending messages, by the time until they are due"),
    _gauge("delay.pending_timers", "{message}", "Pending messages with a timer, by topic"),
    _gauge("delay.pending_levels", "{message}", "Pending messages with a level, by level"),
    _gauge("delay.waiting.level", "{message}", "Pending messages with a level"),
    _gauge("delay.waiting.timer", "{message}", "Pending messages with a timer"),
    _gauge("delay.held", "{message}", "Messages that the shapes of their topics hold in memory"),
    _gauge("delay.enqueue_lag", "{message}", "Stored messages that the delay service has not read"),
    _gauge("delay.dequeue_lag_ms", "s", "Time by which the next message of the delay service is overdue"),
    _gauge("delay.level_lag_ms", "s", "On a RocketMQ cluster: time by which the next message of a level is overdue"),
    _gauge("delay.readable", "1", "On a RocketMQ cluster: 1 while a broker reports the state of its delay services"),
    _histogram("delay.lag_ms", "Time from the deliver time of a message to its release"),
    _histogram("delay.lateness_ms", "The same, by cause"),
    _counter("delay.released", "{message}", "Delayed messages that were released to their topics"),
    _counter("delay.cancelled", "{message}", "Cancelled messages"),
    _counter("delay.rescheduled", "{message}", "Rescheduled messages"),
    _counter("delay.pending_keys", "{message}", "Sends with a pending key, by what became of them"),
    _counter("delay.rolled", "{message}", "Timers that were stored again because they are due beyond the wheel"),
    _counter("delay.poison", "{message}", "Delayed messages that could not be released"),
    # --- store
    _counter("store.appended", "{record}", "Records appended to the commit log"),
    _histogram("store.append_ns", "Time of one append"),
    _histogram("store.flush_ns", "Time of one flush of the commit log"),
    _counter("store.files_deleted", "{file}", "Commit log files that retention deleted"),
    _counter("store.unread_deleted", "{message}",
             "Unread messages and dead letters that were deleted because the disk was full"),
    _counter("store.forcibly_deleted", "{message}",
             "Messages that were deleted before file-reserved-time because the disk was full, read or not"),
    _gauge("store.retention_held", "By",
           "Size of the files older than file-reserved-time that stay because of a group"),
    _gauge("store.disk_near_limit", "1", "1 while the disk is near the limit from which unread messages are deleted"),
    _gauge("store.disk_used", "1", "Used part of the disk of the store directory"),
    _gauge("store.disk_free", "By", "Free space of that disk"),
    _gauge("store.disk_limit_free", "By", "Free space below which unread messages are deleted or new ones refused"),
    _gauge("store.disk_full_in_ms", "s",
           "Time until then at the rate of the last five minutes; missing while the disk does not fill"),
    _gauge("store.size", "By", "Disk space of the commit log and the consume queues"),
    _gauge("store.refusing", "1", "1 while new messages are refused because the disk is full"),
    _gauge("store.flush_failed", "1", "1 while the last flush of the commit log has failed"),
    _gauge("store.recovery_ns", "s", "Time that the last start took to recover the store"),
    # --- continuous copy of the store directory
    _gauge("copy.lag_bytes", "By", "Bytes of the commit log that are not in the copy"),
    _gauge("copy.lag_ms", "s", "Time since everything was in the copy; 0 if everything is"),
    _gauge("copy.max_lag_ms", "s", "Time that mqtemplate.copy.max-lag allows for that"),
    _gauge("copy.failing", "1", "1 while the last attempt to copy has failed; it is tried again"),
    _gauge("copy.refused", "1", "1 after copying has ended because the place belongs to another process or folder"),
    _gauge("copy.fenced", "1", "1 while nothing is accepted or released because the lease of the copy is over"),
    _gauge("copy.snapshot_age_ms", "s", "Age of the last snapshot in the copy"),
    _gauge("copy.snapshot_overdue_ms", "s", "Time by which the next snapshot is overdue; 0 if it is not due"),
    _gauge("copy.follower_silent_ms", "s",
           "Time since a follower was last current, the longest of all; missing while none follows"),
    _counter("copy.copied_bytes", "By", "Bytes written to the copy, compressed"),
    _counter("copy.failures", "{attempt}", "Failed attempts to write to the copy"),
    _counter("copy.gaps", "{gap}", "Times that files were deleted before they were copied"),
    # --- hand-over to another broker
    _counter("hand_over.moved", "{message}", "Pending messages that moved to the new broker"),
    _counter("hand_over.returned", "{message}", "Pending messages that the new broker refused"),
    _gauge("hand_over.pending", "{message}", "Messages that are pending at the old broker"),
    _gauge("hand_over.in_transit", "{message}", "Messages that left the old broker and are not known at the new one"),
    _gauge("hand_over.running", "1", "1 while messages move; 0 while the hand-over is paused, or over"),
    # --- requests, transactions, sequenced sends
    _gauge("request.pending", "{request}", "Requests of this process without a reply"),
    _counter("request.replied", "{request}", "Requests whose reply arrived in time"),
    _counter("request.timed_out", "{request}", "Requests whose reply did not arrive in time"),
    _gauge("transaction.open", "{transaction}", "Transactions without an end"),
    _counter("transaction.checked", "{check}", "Transaction checks sent to producers"),
    _counter("transaction.committed", "{transaction}", "Committed transactions"),
    _counter("transaction.rolled_back", "{transaction}", "Transactions that were rolled back"),
    _counter("transaction.discarded", "{transaction}", "Half messages whose transaction was not ended"),
    _counter("pop.popped", "{message}", "Messages delivered by POP, repeated deliveries too"),
    _counter("pop.acked", "{message}", "Messages acknowledged by consumers that use POP"),
    _counter("pop.expired", "{message}", "Deliveries by POP that were not acknowledged in time"),
    _counter(
        "pop.dead_lettered", "{message}", "Messages that went to the dead-letter topic after their last delivery by POP"
    ),
    _counter(
        "pop.revived_of_rocketmq",
        "{message}",
        "Unacknowledged messages of a RocketMQ broker that used the store directory before: copied to retry topics",
    ),
    _gauge("pop.in_flight", "{message}", "Messages that are delivered by POP and not acknowledged"),
    _gauge("pop.held", "{request}", "POP requests that wait for messages"),
    _gauge("pop.waiting", "{message}", "Messages that wait for earlier ones of their message group"),
    _gauge("pop.oldest_ms", "s", "Time since which a member has its unacknowledged message, of the oldest one"),
    _gauge("pop.unwritten_bytes", "By", "Progress of POP that waits in memory, since the store refuses it"),
    _gauge("sequence.partitions", "{partition}", "Partitions of sequenced sends that the broker remembers"),
    _counter("sequence.repeated", "{message}", "Messages of sequenced sends that were stored already"),
    # --- server
    _gauge("server.connections", "{connection}", "Open connections of clients"),
    _counter("server.requests", "{request}", "Requests of clients"),
    _counter("server.pulled", "{message}", "Messages delivered to remote consumers"),
    _gauge("server.pulls_held", "{request}", "Pull requests that wait for a message"),
    _gauge("server.read_ahead", "{message}", "Messages in memory that were read together for the next pulls"),
    _gauge("server.grpc_clients", "{client}", "Clients of the gRPC protocol"),
    _gauge("server.certificate_expiry_ms", "s", "Time until the certificate of the server expires; then negative"),
    _counter("server.refused.connections", "{connection}", "Connections closed at once because of a limit"),
    _counter("server.refused.created", "{request}", "Requests refused because of too many new topics or groups"),
    _counter("server.refused.groups", "{request}", "Heartbeats refused because of too many groups"),
    _counter("server.refused.grpc_clients", "{client}", "Clients of the gRPC protocol refused because of a limit"),
    _counter("server.refused.locks", "{request}", "Lock requests refused because of too many groups"),
    _counter("server.refused.pulls", "{request}", "Pulls that could not be held"),
    _counter("server.refused.subscriptions", "{request}", "Heartbeats refused because of too many subscriptions"),
    # --- gRPC
    _counter("grpc.calls", "{call}", "Calls of gRPC clients"),
    _gauge("grpc.connections", "{connection}", "Open connections of gRPC clients"),
    _gauge("grpc.open_calls", "{call}", "Calls of gRPC clients that are not complete"),
    _counter("grpc.refused_connections", "{connection}", "Connections of gRPC clients refused because of a limit"),
    # --- Spark
    _counter("spark.batches", "{batch}", "Batches that a Spark listener handled"),
    _counter("spark.messages", "{message}", "Messages that a Spark listener handled"),
    _histogram("spark.batch_ms", "Time of the listener's function for a batch"),
    _counter("spark.dead_letters", "{row}", "Rows that went to the dead-letter topic"),
    _counter("spark.redelivered", "{row}", "Rows that went to the retry topic"),
    _counter("spark.failed_attempts", "{call}", "Calls of the listener's function that raised"),
    _counter("spark.failures", "{query}", "Queries that ended with an error"),
    _counter("spark.restarts", "{query}", "Restarts of queries by policy"),
    _gauge("spark.lag", "{message}", "Messages after the committed offsets of the group"),
    _gauge("spark.running", "1", "1 while the query runs"),
)  # fmt: skip

_BY_SOURCE = {each.source: each for each in INSTRUMENTS}
_SPARK = re.compile(r"spark\.(.+)\.(\w+)")


def exported_name(label: str) -> str:
    """Return the attribute of a label."""
    return _ATTRIBUTES.get(label, _PREFIX + label)


def points(samples: Iterable[MetricSample]) -> Iterator[Point]:
    """Yield the exported values of samples. A metric of the program, not in `INSTRUMENTS`, keeps its name."""
    for sample in samples:
        source, labels = sample.name, dict(sample.labels)
        if (spark := _SPARK.fullmatch(source)) is not None:
            source, labels["group"] = f"spark.{spark[2]}", spark[1]
        instrument = _BY_SOURCE.get(source) or _instrument(sample.kind, source, "", "", source)
        attributes = dict(instrument.attributes or {})
        attributes |= {exported_name(label): value for label, value in labels.items()}
        value = sample.value
        yield Point(
            instrument, value if isinstance(value, HistogramSnapshot) else value * instrument.factor, attributes
        )


def exported_buckets(instrument: Instrument) -> tuple[int, ...]:
    """Return the upper bounds (excluded) of the exported buckets of a histogram, in the unit of its source.

    They are the same at each time, as Prometheus requires, and each is four times the one before.
    """
    powers = range(12, 40, 2) if instrument.factor < 1e-6 else range(0, 32, 2)
    return tuple(1 << power for power in powers)


def cumulated(snapshot: HistogramSnapshot, instrument: Instrument) -> list[tuple[str, int]]:
    """Return for each exported bucket its label ``le`` and the number of values up to it.

    The label is the largest value in the exported unit: a value below the bound of a bucket of whole numbers is at
    most the bound minus 1. The last bucket has all values.
    """
    buckets = [
        (f"{(bound - 1) * instrument.factor:.9g}", sum(n for upper, n in snapshot.buckets.items() if upper <= bound))
        for bound in exported_buckets(instrument)
    ]
    return [*buckets, ("+Inf", snapshot.count)]
