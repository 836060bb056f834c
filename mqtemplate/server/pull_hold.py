"""Pulls that wait for a message: answered when one comes that they want, or when their time is over.

Source: RocketMQ ``broker: PullRequestHoldService``; section 10.3 of the specification.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from mqtemplate.brokers.embedded.queue_reader import QueueReader
from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.selectors.tags import Selector
from mqtemplate.server.raw_reader import RawPull, RawReader, RawStatus
from mqtemplate.server.response import RefusedError
from mqtemplate.store import MessageStore

_log = structlog.stdlib.get_logger("mqtemplate.server")

_FEW = 1_000
"""So many deadlines of pulls that are answered may stay in the heap, beside as many as there are pulls that wait."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """A pull, and all that is needed to look again.

    Attributes:
        asked_offset: Where it wants to read from.
        next_offset: How far was looked; it moves on past messages that are not wanted.
        deadline_ms: When it is answered in any case.
    """

    connection: Connection
    request: RemotingCommand
    queue: MessageQueue
    asked_offset: int
    next_offset: int
    max_count: int
    max_bytes: int
    selector: Selector | None
    deadline_ms: int
    is_done: bool = False


class PullHold:
    """Keeps pulls by topic and queue, and looks again when the store says that messages of the topic became readable.

    - Messages that a pull does not want leave it waiting, but not where it was: they are not looked at twice, and its
      answer at the deadline leads past them.
    - It looks in its own thread; neither writers nor the I/O thread wait for it.
    - The pulls of a connection that ended are dropped with it.

    Args:
        answer: Makes the response of what a pull came to.
        most: So many pulls may wait.
    """

    name = "server.pull_hold"

    def __init__(
        self,
        store: MessageStore,
        reader: QueueReader,
        raw: RawReader,
        clock: Clock,
        answer: Callable[[RemotingCommand, RawPull], RemotingCommand],
        most: int,
    ) -> None:
        self._store = store
        self._reader = reader
        self._raw = raw
        self._clock = clock
        self._answer = answer
        self._most = most
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._held: dict[str, dict[int, list[HeldPull]]] = {}  # topic -> queue id -> in the order they came
        self._of_connection: dict[int, set[HeldPull]] = {}
        self._deadlines: list[tuple[int, int, HeldPull]] = []
        self._count = itertools.count()
        self._rung: set[str] = set()
        self._watched: dict[str, Callable[[], None]] = {}
        self._size = 0
        self._is_closed = False
        store.metrics.gauge("server.pulls_held", self.__len__)

    def __len__(self) -> int:
        return self._size

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # --- holding -------------------------------------------------------------------------------

    def hold(self, pull: HeldPull) -> None:
        """Keep a pull that found nothing new.

        Raises:
            RefusedError: Too many wait, or the server is stopping.
        """
        topic, queue_id = pull.queue.topic, pull.queue.queue_id
        with self._lock:
            if self._is_closed:
                raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping; try again later")
            if self._size >= self._most:
                raise RefusedError(
                    ResponseCode.SYSTEM_BUSY, f"{self._most} pulls wait for messages already; try again later"
                )
            self._size += 1
            self._held.setdefault(topic, {}).setdefault(queue_id, []).append(pull)
            self._of_connection.setdefault(pull.connection.id, set()).add(pull)
            is_first = not self._deadlines or pull.deadline_ms < self._deadlines[0][0]
            self._push(pull)
            self._watch(topic)
        if not pull.connection.is_open:
            self.forget(pull.connection)
        elif self._reader.max_offset(pull.queue) > pull.next_offset:  # it came between the look and the hold
            self._ring(topic)
        elif is_first:
            self._wake()

    def _push(self, pull: HeldPull) -> None:
        heapq.heappush(self._deadlines, (pull.deadline_ms, next(self._count), pull))
        if len(self._deadlines) > 2 * self._size + _FEW:
            self._deadlines = [item for item in self._deadlines if not item[2].is_done]
            heapq.heapify(self._deadlines)

    def _watch(self, topic: str) -> None:
        if topic not in self._watched:
            self._watched[topic] = callback = partial(self._ring, topic)
            self._store.watch(topic, callback)

    def _ring(self, topic: str) -> None:
        """Called by whoever stored something; quick, since many writers may be about."""
        if topic in self._held and topic not in self._rung:
            self._rung.add(topic)
            self._wake()

    def forget(self, connection: Connection) -> None:
        """Drop what a connection had asked for."""
        with self._lock:
            for pull in list(self._of_connection.get(connection.id, ())):
                self._remove(pull)

    def _remove(self, pull: HeldPull) -> bool:
        """Take a pull out; False if somebody else did."""
        if pull.is_done:
            return False
        pull.is_done = True
        self._size -= 1
        queues = self._held[pull.queue.topic]
        queues[pull.queue.queue_id].remove(pull)
        if not queues[pull.queue.queue_id]:
            del queues[pull.queue.queue_id]
        if not queues:
            del self._held[pull.queue.topic]
        mine = self._of_connection[pull.connection.id]
        mine.discard(pull)
        if not mine:
            del self._of_connection[pull.connection.id]
        return True

    # --- looking again -------------------------------------------------------------------------

    def step(self) -> int | None:
        """Look again where something came, answer those whose time is over; when the next one's is."""
        for _ in range(len(self._rung)):  # once each: where more comes all the time, the others have their turn too
            for pulls in self._waiting(self._rung.pop()):
                end = self._reader.max_offset(pulls[0].queue)
                for pull in pulls:
                    if pull.next_offset != end:
                        self._look(pull)
        now_ms = self._clock.now_ms()
        while (over := self._next_due(now_ms)) is not None:
            self._look(over, is_last=True)
        with self._lock:
            due_ms = self._deadlines[0][0] if self._deadlines else None
        return now_ms if self._rung else due_ms

    def _next_due(self, now_ms: int) -> HeldPull | None:
        """Take out one whose time is over."""
        with self._lock:
            while self._deadlines and (self._deadlines[0][2].is_done or self._deadlines[0][0] <= now_ms):
                pull = heapq.heappop(self._deadlines)[2]
                if not pull.is_done:
                    return pull
        return None

    def _waiting(self, topic: str) -> list[list[HeldPull]]:
        """Those that wait for messages of *topic*, queue by queue."""
        with self._lock:
            return [list(pulls) for pulls in self._held.get(topic, {}).values()]

    def _look(self, pull: HeldPull, *, is_last: bool = False) -> None:
        """Answer a pull if something is there that it matches, or if this is its last chance."""
        try:
            found = self._find(pull, is_last=is_last)
            response = None if found is None else self._answer(pull.request, found)
        except StoreError as exc:
            _log.error("pull.failed", topic=pull.queue.topic, queue=pull.queue.queue_id, exc_info=exc)
            response = pull.request.response(ResponseCode.SYSTEM_ERROR, remark=str(exc))
        if response is not None:
            with self._lock:
                is_ours = self._remove(pull)
            if is_ours:
                pull.connection.reply(response)

    def _find(self, pull: HeldPull, *, is_last: bool) -> RawPull | None:
        """What a pull comes to now; None if it may wait on."""
        found = self._raw.pull(pull.queue, pull.next_offset, pull.max_count, pull.max_bytes, pull.selector)
        if found.status is RawStatus.NO_MATCHED_MSG and not is_last:
            pull.next_offset = found.next_begin_offset
            if found.next_begin_offset < found.max_offset:
                self._rung.add(pull.queue.topic)  # there is more to look at, next time
            return None
        if found.status is RawStatus.NO_NEW_MSG:
            if not is_last:
                return None
            if pull.next_offset > pull.asked_offset:
                found.status = RawStatus.NO_MATCHED_MSG  # its reader goes on behind what it does not want
        return found

    def close(self) -> None:
        """Answer everything that waits, and take no more."""
        with self._lock:
            self._is_closed = True
            for topic, callback in self._watched.items():
                self._store.unwatch(topic, callback)
            self._watched.clear()
        for topic in list(self._held):
            for pull in itertools.chain.from_iterable(self._waiting(topic)):
                self._look(pull, is_last=True)
        self._deadlines.clear()
