"""Which consumer groups have members, and for how long the others have been away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import ConsumerGroupInfo
from mqtemplate.engine.groups import LocalGroups
from mqtemplate.event_log import get_logger
from mqtemplate.services import wall_time
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import ConsumerOffsets, format_errors, read_table, write_table
from mqtemplate.topics import RETRY_TOPIC_PREFIX, is_system_group

_log = get_logger("mqtemplate.broker")

_HOUR_MS = 3_600_000
_CHECKS = 100
"""Checks of the activity of groups in one ``group-reserved-time``: after a kill it is wrong by at most one percent."""

GroupTopic = tuple[str, str]
"""A group, and a topic of it."""


@dataclass(eq=False)
class GroupMembers:
    """The members of all groups: those in this process, and the clients of a server."""

    local: LocalGroups
    _remote: Callable[[], Iterable[ConsumerGroupInfo]] = tuple

    def connect_remote(self, groups: Callable[[], Iterable[ConsumerGroupInfo]]) -> None:
        """Note how to find the groups whose members are clients of a server."""
        self._remote = groups

    def remote(self) -> list[ConsumerGroupInfo]:
        """Return the clustering groups whose members are clients of a server."""
        return [info for info in self._remote() if not info.is_broadcasting]

    def subscribed(self) -> set[GroupTopic]:
        """Return the topics that members of clustering groups read."""
        found = {(info.group, topic) for info in self.remote() for topic in info.subscriptions}
        found |= {(info.group, RETRY_TOPIC_PREFIX + info.group) for info in self.remote()}
        return found | self.local.subscribed()

    def broadcasting(self) -> set[str]:
        """Return the groups whose members all get all messages: their offsets are not in the table of the broker."""
        return {info.group for info in self._remote() if info.is_broadcasting} | self.local.broadcasting()


class _Activity(NamedTuple):
    """Last observation of a group in one topic.

    Attributes:
        idle_ms: Time without a member and without a commit, while a broker ran.
        offset_sum: Sum of the committed offsets: it changes with each commit.
    """

    idle_ms: int
    offset_sum: int


class GroupActivity:
    """Service that notes for how long each group has been without members and commits, by topic.

    - The time in which no broker runs does not count: no group could be active then.
    - The file is mqtemplate's own; RocketMQ ignores it. A group that is missing in it is active.
    - A group that is gone keeps its committed offsets. It counts again with its next member or commit.

    Args:
        members: The members that are there now.
        reserved_hours: ``group-reserved-time``; None: no group is ever gone, and no file is written.
    """

    name = "broker.group_activity"
    _FILE = "config/groupActivity.json"

    def __init__(
        self,
        store_files: StoreFiles,
        clock: Clock,
        offsets: ConsumerOffsets,
        members: GroupMembers,
        reserved_hours: int | None,
    ) -> None:
        self._store_files = store_files
        self._clock = clock
        self._offsets = offsets
        self._members = members
        self._reserved_ms = None if reserved_hours is None else reserved_hours * _HOUR_MS
        self._lock = threading.Lock()  # the end of the engine checks too, in another thread
        self._activities: dict[GroupTopic, _Activity] = {}
        self._checked_ms = 0  # steady
        self._due_ms: int | None = None  # steady

    def load(self) -> None:
        """Read the file, after the offsets were loaded.

        Raises:
            StoreFormatError: It cannot be read.
        """
        if self._reserved_ms is None:
            return
        table = read_table(self._store_files, self._FILE)
        with format_errors(self._FILE):
            for key, entry in table.get("activityTable", {}).items():
                topic, _, group = key.rpartition("@")
                self._activities[group, topic] = _Activity(int(entry["idleMs"]), int(entry["offsetSum"]))
        self._checked_ms = self._clock.steady_ms()
        self._due_ms = self._checked_ms  # a commit before a kill is noticed by its sum

    def is_gone(self, group: str, topic: str) -> bool:
        """Return True if retention does not keep messages of *topic* for *group* any more."""
        found = self._activities.get((group, topic))
        return found is not None and self._is_over(found.idle_ms)

    def _is_over(self, idle_ms: int) -> bool:
        return self._reserved_ms is not None and idle_ms >= self._reserved_ms

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the next check is known in advance."""

    def step(self) -> int | None:
        """Check the groups, if it is time. Return the time of the next check."""
        if self._due_ms is not None and self._due_ms <= self._clock.steady_ms():
            self.check()
        return wall_time(self._clock, self._due_ms)

    def check(self) -> None:
        """Count the time since the last check for each group without members and commits, and write the file."""
        if self._reserved_ms is not None:
            with self._lock:
                self._check(self._reserved_ms)

    def _check(self, reserved_ms: int) -> None:
        now_ms = self._clock.steady_ms()
        passed_ms, self._checked_ms = now_ms - self._checked_ms, now_ms
        before, subscribed = self._activities, self._members.subscribed() | self._members.local.take_joined()
        self._activities = found = {
            key: self._observe(before.get(key), sum(offsets.values()), passed_ms, is_read=key in subscribed)
            for key, offsets in self._offsets.all().items()
            if not is_system_group(key[0])
        }
        self._report(before)
        left_ms = [reserved_ms - each.idle_ms for each in found.values() if not self._is_over(each.idle_ms)]
        self._due_ms = now_ms + min([reserved_ms // _CHECKS, *left_ms])
        if found != before:
            table = {
                f"{topic}@{group}": {"idleMs": each.idle_ms, "offsetSum": each.offset_sum}
                for (group, topic), each in sorted(found.items())
            }
            write_table(self._store_files, self._FILE, {"activityTable": table})

    @staticmethod
    def _observe(before: _Activity | None, offset_sum: int, passed_ms: int, *, is_read: bool) -> _Activity:
        if before is None or is_read or before.offset_sum != offset_sum:
            return _Activity(0, offset_sum)
        return _Activity(before.idle_ms + passed_ms, offset_sum)

    def _report(self, before: dict[GroupTopic, _Activity]) -> None:
        """Log which groups are gone since the check *before*."""
        for (group, topic), each in self._activities.items():
            earlier = before.get((group, topic))
            if self._is_over(each.idle_ms) and (earlier is None or not self._is_over(earlier.idle_ms)):
                _log.warning(
                    "group.gone",
                    group=group,
                    topic=topic,
                    idle_hours=each.idle_ms // _HOUR_MS,
                    hint="its unread messages are not kept any more (group-reserved-time); when it returns, it "
                    "continues with the first message that exists; forget it with: mqtemplate offsets forget "
                    f"{group}",
                )
