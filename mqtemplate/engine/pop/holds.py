"""Pops that wait for messages: their order, their bounds and their timeouts."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mqtemplate.engine.pop.receipt_handle import retry_topic_v1, retry_topic_v2
from mqtemplate.engine.pop.requests import PopRequest, PopResult
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import RETRY_TOPIC_PREFIX

MAX_HELD_FOR_KEY = 1_024
"""Most pops of one group that wait for messages of one topic. Source: ``BrokerConfig.popPollingSize``."""


class HoldKey(NamedTuple):
    """A group and its topic; all pops of a key get messages in turn."""

    group: str
    topic: str


class HeldPop:
    """A pop that waits for messages. It ends once: with a result, or by `cancel`."""

    __slots__ = ("_holds", "_on_result", "deadline_ms", "key", "number", "request")

    def __init__(
        self, holds: HeldPops, request: PopRequest, deadline_ms: int, on_result: Callable[[PopResult], None]
    ) -> None:
        self._holds = holds
        self._on_result: Callable[[PopResult], None] | None = on_result
        self.request = request
        self.key = HoldKey(request.group, request.topic)
        self.deadline_ms = deadline_ms  # steady
        self.number = 0

    def cancel(self) -> None:
        """End it without a result. Messages that are popped for it at this moment are put back."""
        self._holds.end(self)

    def take_callback(self) -> Callable[[PopResult], None] | None:
        """Return the function that takes the result, once; None if the pop has ended. `HeldPops` has the lock."""
        callback, self._on_result = self._on_result, None
        return callback


@dataclass(slots=True)
class _TopicWatch:
    """Watch of one topic.

    Attributes:
        arrivals: Number of notifications.
        keys: The keys whose pops read the topic.
    """

    arrivals: int = 0
    keys: set[HoldKey] = field(default_factory=set)


class HeldPops:
    """The pops that wait. A topic that was waited for stays watched.

    Args:
        max_held: Most pops that wait.
    """

    def __init__(self, store: MessageStore, max_held: int) -> None:
        self._store = store
        self._max_held = max_held
        self._lock = threading.Lock()
        self._held: dict[HoldKey, OrderedDict[int, HeldPop]] = {}
        self._count = 0
        self._watches: dict[str, tuple[_TopicWatch, Callable[[], None]]] = {}
        self._ready: set[HoldKey] = set()
        self._deadlines: list[tuple[int, int, HeldPop]] = []
        self._numbers = itertools.count(1)
        self._wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Return the number of pops that wait."""
        return self._count

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when a pop may find messages, or has an earlier deadline."""
        self._wake = wake

    # --- arrivals ------------------------------------------------------------------------------

    def watch(self, key: HoldKey) -> int:
        """Watch the topics of *key*, and return the number of arrivals so far; see `add`."""
        arrivals = 0
        for topic in _topics_of(key):
            found = self._watches.get(topic)
            if found is None:
                found = self._watch(topic)
            arrivals += found[0].arrivals
        return arrivals

    def _watch(self, topic: str) -> tuple[_TopicWatch, Callable[[], None]]:
        with self._lock:
            found = self._watches.get(topic)
            if found is None:
                watch = _TopicWatch()
                found = self._watches[topic] = watch, partial(self._arrived, watch)
                self._store.watch(topic, found[1])
        return found

    def _arrived(self, watch: _TopicWatch) -> None:
        with self._lock:
            watch.arrivals += 1  # two threads without the lock could count one arrival, which `add` takes as none
            self._ready |= watch.keys
            is_awaited = bool(watch.keys)
        if is_awaited:
            self._wake()

    def changed(self, key: HoldKey) -> None:
        """Note that a pop of *key* may find messages now, for another reason than new ones.

        Args:
            key: It may name a retry topic: those pops read it that read the topic of the messages.
        """
        with self._lock:  # a pop that found nothing is added before or after both: it must not wait for the next change
            awaited = {key} if key in self._held else set()
            found = self._watches.get(key.topic)
            if found is not None:
                found[0].arrivals += 1
                if key.topic.startswith(RETRY_TOPIC_PREFIX):
                    awaited.update(each for each in found[0].keys if each.group == key.group)
            self._ready |= awaited
        if awaited:
            self._wake()

    def all_changed(self) -> None:
        """Note that all pops may find messages now."""
        with self._lock:
            self._ready.update(self._held)
        self._wake()

    # --- pops ----------------------------------------------------------------------------------

    def add(self, held: HeldPop, arrivals: int) -> bool:
        """Let a pop wait that found nothing. Return False if too many wait.

        Args:
            arrivals: Result of `watch` before the pop: messages may have arrived meanwhile.
        """
        key = held.key
        with self._lock:
            waiting = self._held.get(key)
            if self._count >= self._max_held or (waiting is not None and len(waiting) >= MAX_HELD_FOR_KEY):
                return False
            if waiting is None:
                waiting = self._held[key] = OrderedDict()
                for topic in _topics_of(key):
                    self._watches[topic][0].keys.add(key)
            held.number = next(self._numbers)
            waiting[held.number] = held
            self._count += 1
            heapq.heappush(self._deadlines, (held.deadline_ms, held.number, held))
            is_first = self._deadlines[0][2] is held
            is_ready = sum(self._watches[topic][0].arrivals for topic in _topics_of(key)) != arrivals
            if is_ready:
                self._ready.add(key)
        if is_ready or is_first:
            self._wake()
        return True

    def end(self, held: HeldPop) -> Callable[[PopResult], None] | None:
        """End a pop. Return the function that takes its result; None if it has ended already."""
        with self._lock:
            callback = held.take_callback()
            waiting = self._held.get(held.key)
            if waiting is not None and waiting.pop(held.number, None) is not None:
                self._count -= 1
                if not waiting:
                    del self._held[held.key]
                    self._ready.discard(held.key)
                    for topic in _topics_of(held.key):
                        self._watches[topic][0].keys.discard(held.key)
            if len(self._deadlines) > 2 * self._count + MAX_HELD_FOR_KEY:
                each_held = (each for pops in self._held.values() for each in pops.values())
                self._deadlines = sorted((each.deadline_ms, each.number, each) for each in each_held)
        return callback

    def count_of(self, group: str) -> int:
        """Return the number of pops of a group that wait."""
        with self._lock:
            return sum(len(waiting) for key, waiting in self._held.items() if key.group == group)

    def take_ready(self) -> list[HoldKey]:
        """Return the keys whose pops may find messages."""
        if not self._ready:
            return []
        with self._lock:
            found, self._ready = self._ready, set()
        return sorted(found)

    def waiting(self, key: HoldKey) -> list[HeldPop]:
        """Return the pops of *key*, in the order of their arrival."""
        with self._lock:
            return list(self._held.get(key, {}).values())

    def take_timed_out(self, now_ms: int) -> list[HeldPop]:
        """Return the pops whose deadline has passed; *now_ms* is steady. `end` each of them."""
        found = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now_ms:
                _, number, held = heapq.heappop(self._deadlines)
                if number in self._held.get(held.key, ()):
                    found.append(held)
        return found

    def next_deadline_ms(self) -> int | None:
        """Return the next deadline (steady); it may belong to a pop that has ended."""
        with self._lock:
            return self._deadlines[0][0] if self._deadlines else None

    def count(self, key: HoldKey, queue_id: int) -> int:
        """Return the number of pops of *key* that wait for messages of one queue; -1 stands for all queues."""
        return sum(held.request.queue_id == queue_id for held in self.waiting(key))

    def all(self) -> list[HeldPop]:
        """Return all pops that wait."""
        with self._lock:
            return [held for waiting in self._held.values() for held in waiting.values()]


def _topics_of(key: HoldKey) -> tuple[str, str, str]:
    return key.topic, retry_topic_v1(key.topic, key.group), retry_topic_v2(key.topic, key.group)
