"""State of the broker, read at most every few seconds: for the overview and the list of groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mqtemplate.broker import TopicInfo, TopicKind
from mqtemplate.console.cache import OffsetSample
from mqtemplate.console.site import Site
from mqtemplate.operations.problems import BrokerReading, read_broker

STATE_KEY = "state of the broker"
"""Key of the state in the cache."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """State of the broker.

    Attributes:
        topics: The topics of applications.
        store_bytes: Size of the files of the store directory; None if it is not on this machine.
    """

    reading: BrokerReading
    topics: list[TopicInfo]
    store_bytes: int | None = None


def read_state(site: Site) -> BrokerState:
    """Read the state, and add its offsets and lags to the rates."""
    path = None if site.source is None else site.source.path
    with site.reading() as access:
        topics = [each for each in access.admin.topics() if each.kind is TopicKind.NORMAL]
        reading = read_broker(access, path)
    stored = {topic.name: sum(span.max_offset for span in topic.queues) for topic in topics}
    consumed = {
        group.name: {each.queue: each.committed for each in group.progress if each.committed is not None}
        for group in reading.groups
    }
    lags = {group.name: group.lag for group in reading.groups}
    site.rates.add(OffsetSample(reading.now_ms, stored, consumed, lags))
    return BrokerState(reading, topics, None if path is None else _size(path))


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:  # retention has deleted it
            continue
    return total
