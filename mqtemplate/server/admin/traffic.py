"""How much goes in and out: rates and sums for tools, from counts that are looked at now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.remoting.protocol.bodies.route import BrokerStatsData, BrokerStatsItem
from mqtemplate.server.topic_configs import TopicConfigs
from mqtemplate.store import ConsumerOffsets, MessageStore

_SECOND = 1_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE

_Key = tuple[str, ...]
_Counts = dict[_Key, int]

_IN: _Key = ("in",)
_OUT: _Key = ("out",)


class DayTotals(NamedTuple):
    """A count at the begin of yesterday, at the begin of today, and now; local time."""

    yesterday_morning: int
    today_morning: int
    now: int


class _Ring:
    """Counts at equal distances in time, the newest last."""

    def __init__(self, every_ms: int, length: int) -> None:
        self._every_ms = every_ms
        self._samples: deque[tuple[int, _Counts]] = deque(maxlen=length)

    def take(self, now_ms: int, counts: _Counts) -> None:
        if not self._samples or now_ms >= self._samples[-1][0] + self._every_ms:
            self._samples.append((now_ms, counts))

    def growth(self, key: _Key, now_ms: int, count: int, span_ms: int) -> tuple[int, float]:
        """How much *key* grew in the last *span_ms*, and how much of it in a second; less long if it began later."""
        kept = [sample for sample in self._samples if sample[0] >= now_ms - span_ms - self._every_ms // 2]
        since_ms, before = kept[0] if kept else (now_ms, {})
        if now_ms <= since_ms:
            return 0, 0.0
        grown = max(count - before.get(key, 0), 0)
        return grown, grown * _SECOND / (now_ms - since_ms)


class Traffic:
    """A service that looks at counts every ten seconds; no sender and no consumer pays for it.

    What a topic takes is read off its queues, what a group gets off the offsets that it commits, so nothing is counted
    message by message.

    Args:
        sent_out: How many messages consumers were given so far.
    """

    name = "server.traffic"
    _EVERY_MS = 10 * _SECOND

    def __init__(
        self,
        store: MessageStore,
        topics: TopicConfigs,
        offsets: ConsumerOffsets,
        clock: Clock,
        sent_out: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._clock = clock
        self._sent_out = sent_out
        self._appended = store.metrics.counter("store.appended")
        self._minute = _Ring(self._EVERY_MS, 7)
        self._hour = _Ring(10 * _MINUTE, 7)
        self._day = _Ring(4 * _HOUR, 7)
        self._keys: dict[_Key, _Key] = {}
        self._today: date | None = None
        self._mornings: tuple[_Counts, _Counts] = ({}, {})
        self._due_ms = 0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nothing wakes it before its time."""

    def step(self) -> int | None:
        now_ms = self._clock.now_ms()
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + self._EVERY_MS
            self._take(now_ms)
        return self._due_ms

    def _take(self, now_ms: int) -> None:
        counts = self._counts()
        for ring in (self._minute, self._hour, self._day):
            ring.take(now_ms, counts)
        today = datetime.fromtimestamp(now_ms / _SECOND, UTC).astimezone().date()
        if today != self._today:
            self._mornings = (self._mornings[1], self._totals())
            self._today = today

    def _totals(self) -> _Counts:
        return {_IN: self._appended.value, _OUT: self._sent_out()}

    def _counts(self) -> _Counts:
        """All counts of now. Samples share their keys, so that one costs little memory though there are many topics."""
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

    # --- asking --------------------------------------------------------------------------------

    def rates_in(self) -> tuple[float, float, float]:
        """Messages stored per second: in the last ten seconds, minute, ten minutes."""
        return self._rates(_IN)

    def rates_out(self) -> tuple[float, float, float]:
        """Messages given out per second, alike."""
        return self._rates(_OUT)

    def _rates(self, key: _Key) -> tuple[float, float, float]:
        now_ms, count = self._clock.now_ms(), self._totals()[key]
        return (
            self._minute.growth(key, now_ms, count, 10 * _SECOND)[1],
            self._minute.growth(key, now_ms, count, _MINUTE)[1],
            self._hour.growth(key, now_ms, count, 10 * _MINUTE)[1],
        )

    def total_in(self) -> DayTotals:
        """Messages stored since the server was started."""
        return self._days(_IN)

    def total_out(self) -> DayTotals:
        """Messages given out since the server was started."""
        return self._days(_OUT)

    def _days(self, key: _Key) -> DayTotals:
        yesterday, today = self._mornings
        return DayTotals(yesterday.get(key, 0), today.get(key, 0), self._totals()[key])

    def topic_rate(self, topic: str) -> float:
        """Messages per second that were stored in *topic* in the last minute."""
        return self._minute.growth(("topic", topic), self._clock.now_ms(), self._topic_count(topic), _MINUTE)[1]

    def group_rate(self, group: str, topic: str) -> float:
        """Messages of *topic* per second that *group* was done with in the last minute."""
        count = sum(self._offsets.offsets(group, topic).values())
        return self._minute.growth(("group", group, topic), self._clock.now_ms(), count, _MINUTE)[1]

    def topic_stats(self, topic: str) -> BrokerStatsData | None:
        """What was stored in *topic* in the last minute, hour and day; None if there is no such topic."""
        if self._topics.find(topic) is None:
            return None
        return self._stats(("topic", topic), self._topic_count(topic))

    def group_stats(self, group: str, topic: str) -> BrokerStatsData | None:
        """What *group* was done with of *topic*; None if it never said."""
        offsets = self._offsets.offsets(group, topic)
        return self._stats(("group", group, topic), sum(offsets.values())) if offsets else None

    def _stats(self, key: _Key, count: int) -> BrokerStatsData:
        now_ms = self._clock.now_ms()
        items = [
            BrokerStatsItem(sum=grown, tps=rate)
            for ring, span_ms in ((self._minute, _MINUTE), (self._hour, _HOUR), (self._day, 24 * _HOUR))
            for grown, rate in [ring.growth(key, now_ms, count, span_ms)]
        ]
        return BrokerStatsData(stats_minute=items[0], stats_hour=items[1], stats_day=items[2])
