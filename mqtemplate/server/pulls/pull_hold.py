"""Held pulls (long polling): a pull without new messages is answered when a message arrives, or at its deadline.

Source: RocketMQ ``broker: PullRequestHoldService``.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from logging import ERROR

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.pulls.raw_reader import RawPull, RawQuery, RawReader, RawStatus
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.limits import Quota
from mqtemplate.services import wall_time

_log = get_logger("mqtemplate.server")

_MAX_STALE_DEADLINES = 1_000
"""The heap may keep this many deadlines of answered pulls, plus as many as there are held pulls."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """One held pull, of any protocol.

    Attributes:
        answer: Called once, with the messages or an error, unless the connection of the caller is closed before.
        query: The requested messages.
        requested_offset: Queue offset in the request.
        next_offset: Queue offset of the first message that was not compared with the selector yet.
        deadline_ms: Time of the response if no message arrives.
    """

    caller: Caller
    answer: Callable[[RawPull | StoreError], None]
    query: RawQuery
    requested_offset: int
    next_offset: int
    deadline_ms: int
    is_done: bool = False


class PullHold:
    """Holds pulls by topic and queue, and repeats them when the store reports new messages of the topic. A `Service`.

    - A message that does not match the selector is read once: the pull continues after it. The response at the deadline
      has the next offset.
    - Pulls are repeated in the service's thread. Neither producers nor the I/O thread wait for it.
    - The pulls of a closed connection are removed.

    Args:
        quota: Counts the held pulls of each client.
    """

    name = "server.pull_hold"

    def __init__(self, raw: RawReader, clock: Clock, quota: Quota) -> None:
        self._raw = raw
        self._clock = clock
        self._quota = quota
        self._peer_log = LimitedLog(_log, clock.now_ms)
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._held: dict[str, dict[int, dict[HeldPull, None]]] = {}  # topic -> queue ID -> in order of arrival
        self._of_connection: dict[int, set[HeldPull]] = {}
        self._deadlines: list[tuple[int, int, HeldPull]] = []
        self._sequence = itertools.count()  # orders pulls with equal deadlines in the heap
        self._changed_topics: set[str] = set()
        self._watched: dict[str, Callable[[], None]] = {}
        self._size = 0
        self._is_closed = False
        raw.store.metrics.gauge("server.pulls_held", self.__len__)

    def __len__(self) -> int:
        return self._size

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when `step` has work to do."""
        self._wake = wake

    # --- holding -------------------------------------------------------------------------------

    def hold(self, pull: HeldPull) -> None:
        """Hold a pull that found no new message.

        Raises:
            RefusedError: The client has too many held pulls, or the server is stopping.
        """
        topic, queue_id, connection = pull.query.queue.topic, pull.query.queue.queue_id, pull.caller.connection
        with self._lock:
            if self._is_closed:
                raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping; try again later")
            self._quota.take(pull.caller.owner)
            self._size += 1
            self._held.setdefault(topic, {}).setdefault(queue_id, {})[pull] = None
            self._of_connection.setdefault(connection.id, set()).add(pull)
            is_first = not self._deadlines or pull.deadline_ms < self._deadlines[0][0]
            self._push_deadline(pull)
            self._watch(topic)
        if not connection.is_open:
            self.forget(connection.id)
        elif self._raw.reader.max_offset(pull.query.queue) > pull.next_offset:
            # The message arrived after the pull and before `_watch`: its notification found no pull.
            self._on_new_messages(topic)
        elif is_first:
            self._wake()

    def _push_deadline(self, pull: HeldPull) -> None:
        heapq.heappush(self._deadlines, (pull.deadline_ms, next(self._sequence), pull))
        if len(self._deadlines) > 2 * self._size + _MAX_STALE_DEADLINES:
            self._deadlines = [item for item in self._deadlines if not item[2].is_done]
            heapq.heapify(self._deadlines)

    def _watch(self, topic: str) -> None:
        if topic not in self._watched:
            self._watched[topic] = callback = partial(self._on_new_messages, topic)
            self._raw.store.watch(topic, callback)

    def _on_new_messages(self, topic: str) -> None:
        """Note that *topic* has new messages. The store calls this in each producer's thread, so it takes no lock."""
        if topic in self._held and topic not in self._changed_topics:
            self._changed_topics.add(topic)
            self._wake()

    def forget(self, connection: int, most: int = 1 << 62) -> bool:
        """Remove *most* pulls of a closed connection. Return True if it has more."""
        with self._lock:
            for pull in list(self._of_connection.get(connection, ()))[:most]:
                self._remove(pull)
            return connection in self._of_connection

    def answer_for(self, accounts: Set[str]) -> None:
        """Answer the held pulls of accounts whose rights have changed: their next pulls are checked again."""
        with self._lock:
            pulls = [pull for held in self._of_connection.values() for pull in held if pull.caller.account in accounts]
        for pull in pulls:
            self._repeat(pull, is_last=True)

    def _remove(self, pull: HeldPull) -> bool:
        """Remove a pull. Return False if another thread removed it before."""
        if pull.is_done:
            return False
        pull.is_done = True
        self._size -= 1
        self._quota.give(pull.caller.owner)
        topic, queue_id = pull.query.queue.topic, pull.query.queue.queue_id
        queues = self._held[topic]
        del queues[queue_id][pull]
        if not queues[queue_id]:
            del queues[queue_id]
        if not queues:
            del self._held[topic]
        connection = pull.caller.connection.id
        pulls = self._of_connection[connection]
        pulls.discard(pull)
        if not pulls:
            del self._of_connection[connection]
        return True

    # --- repeating -----------------------------------------------------------------------------

    def step(self) -> int | None:
        """Repeat pulls of changed topics, answer pulls past their deadline, and return the next deadline."""
        # Only the topics that are in the set now: a topic with constant traffic must not block the others.
        for _ in range(len(self._changed_topics)):
            for pulls in self._pulls_of(self._changed_topics.pop()):
                end = self._raw.reader.max_offset(pulls[0].query.queue)
                for pull in pulls:
                    if pull.next_offset != end:
                        self._repeat(pull)
        now_ms = self._clock.steady_ms()
        while (expired := self._pop_expired(now_ms)) is not None:
            self._repeat(expired, is_last=True)
        with self._lock:
            due_ms = self._deadlines[0][0] if self._deadlines else None
        return self._clock.now_ms() if self._changed_topics else wall_time(self._clock, due_ms)

    def _pop_expired(self, now_ms: int) -> HeldPull | None:
        with self._lock:
            while self._deadlines and (self._deadlines[0][2].is_done or self._deadlines[0][0] <= now_ms):
                pull = heapq.heappop(self._deadlines)[2]
                if not pull.is_done:
                    return pull
        return None

    def _pulls_of(self, topic: str) -> list[list[HeldPull]]:
        """Return the held pulls of *topic*, one list for each queue."""
        with self._lock:
            return [list(pulls) for pulls in self._held.get(topic, {}).values()]

    def _repeat(self, pull: HeldPull, *, is_last: bool = False) -> None:
        """Repeat a pull, and answer it if it found a message or *is_last* is set."""
        found: RawPull | StoreError | None
        try:
            found = self._pull(pull, is_last=is_last)
        except StoreError as exc:
            queue = pull.query.queue
            self._peer_log.log(ERROR, "pull.failed", topic=queue.topic, queue=queue.queue_id, exc_info=exc)
            found = exc
        if found is not None:
            with self._lock:
                is_removed = self._remove(pull)
            if is_removed:
                pull.answer(found)

    def _pull(self, pull: HeldPull, *, is_last: bool) -> RawPull | None:
        """Return the result of a pull, or None if the pull remains held."""
        found = self._raw.pull(pull.query, pull.next_offset)
        if found.status is RawStatus.NO_MATCHED_MSG and not is_last:
            pull.next_offset = found.next_begin_offset
            if found.next_begin_offset < found.max_offset:
                self._changed_topics.add(pull.query.queue.topic)  # One pull reads a limited number: continue in `step`.
            return None
        if found.status is RawStatus.NO_NEW_MSG:
            if not is_last:
                return None
            if pull.next_offset > pull.requested_offset:
                # The client would pull the same messages again if the response had the requested offset.
                found.status = RawStatus.NO_MATCHED_MSG
        return found

    def close(self, timeout_s: float) -> None:
        """Answer the held pulls, as many as *timeout_s* allows, and refuse more."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for topic, callback in self._watched.items():
                self._raw.store.unwatch(topic, callback)
            self._watched.clear()
        for topic in list(self._held):
            for pull in itertools.chain.from_iterable(self._pulls_of(topic)):
                if time.monotonic() > deadline:
                    return
                self._repeat(pull, is_last=True)
        self._deadlines.clear()
