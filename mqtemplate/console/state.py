"""State of the broker and of the application, read at most every few seconds: for the overviews and the lists."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqtemplate.broker import TopicInfo, TopicKind
from mqtemplate.console.cache import Cached, OffsetSample
from mqtemplate.console.site import Site
from mqtemplate.operations.problems import BrokerReading, Problem, application_problems, read_broker

_KEY = "state of the broker"
FIRST_PAINT_S = 0.05
"""Time that a page waits for what it shows. A page that is sent without it reads it again soon."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """State of the broker.

    Attributes:
        all_topics: All topics, system topics included.
        store_bytes: Size of the files of the store directory; None if it is not on this machine.
    """

    reading: BrokerReading
    all_topics: list[TopicInfo]
    store_bytes: int | None = None

    @property
    def topics(self) -> list[TopicInfo]:
        """The topics of applications."""
        return [each for each in self.all_topics if each.kind is TopicKind.NORMAL]


def state_of(site: Site, wait_s: float = FIRST_PAINT_S) -> Cached[BrokerState] | None:
    """Return the state, some seconds old; None if it was never read and reading takes longer than *wait_s*.

    Raises:
        MQTemplateError: The broker cannot be read.
    """
    return site.cache.get(_KEY, lambda: _read(site), wait_s)


def _read(site: Site) -> BrokerState:
    """Read the state, and add its offsets and lags to the rates."""
    path = None if site.source is None else site.source.path
    with site.reading() as access:
        topics = access.admin.topics()
        reading = read_broker(access, path)
    state = BrokerState(reading, topics, None if path is None else _size(path))
    stored = {topic.name: sum(span.max_offset for span in topic.queues) for topic in state.topics}
    consumed = {
        group.name: {each.queue: each.committed for each in group.progress if each.committed is not None}
        for group in reading.groups
    }
    lags = {group.name: group.lag for group in reading.groups}
    site.rates.add(OffsetSample(reading.now_ms, stored, consumed, lags))
    return state


@dataclass(frozen=True, slots=True)
class ApplicationReading:
    """State of the application, from the documents that its actuator has.

    Attributes:
        health: None without this document.
        late: Its recent late deliveries.
        problems: Its problems of now, errors first.
    """

    health: Mapping[str, Any] | None
    listeners: Sequence[Mapping[str, Any]]
    late: Sequence[Mapping[str, Any]]
    problems: Sequence[Problem]


def application_of(site: Site, wait_s: float = FIRST_PAINT_S) -> Cached[ApplicationReading] | None:
    """Return the state, some seconds old; None if it was never read and reading takes longer than *wait_s*.

    Raises:
        BrokerError: The application does not answer.
    """
    return site.cache.get("application", lambda: _read_application(site), wait_s)


def _read_application(site: Site) -> ApplicationReading:
    listeners, lateness, health = (site.document(name) for name in ("listeners", "lateness", "health"))
    found = [] if listeners is None else listeners["listeners"]
    late = [] if lateness is None else lateness["deliveries"]
    return ApplicationReading(health, found, late, application_problems(health, found))


def _size(path: Path) -> int:
    """Return the size of all files below a directory. A thousand topics have thousands of files."""
    total, folders = 0, [str(path)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:  # its topic was deleted
            continue
        for each in entries:
            try:
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.path)
                else:
                    total += each.stat().st_blocks * 512
            except OSError:  # retention has deleted it
                continue
    return total
