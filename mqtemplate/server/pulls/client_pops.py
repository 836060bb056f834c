"""Held pops of remote clients, and requests that wait until a group could pop a message.

Source: RocketMQ ``broker: PopLongPollingService``, ``NotificationProcessor``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial

from mqtemplate.clock import Clock
from mqtemplate.engine.pop.holds import HeldPop
from mqtemplate.engine.pop.pop import PopService
from mqtemplate.engine.pop.requests import PopRequest, PopResult
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.limits import Quota
from mqtemplate.services import wall_time
from mqtemplate.store.message_store import MessageStore

_RECHECK_MS = 1_000
"""An acknowledgement that frees an ordered queue is no new message: waiting requests look for it this often."""


@dataclass(slots=True, eq=False)
class WaitingPop:
    """A pop of a client that the engine holds.

    Attributes:
        answer: Called once, with the result; with None if the server ends the wait.
        held: The pop in the engine, once it is there.
    """

    caller: Caller
    group: str
    topic: str
    answer: Callable[[PopResult | None], None]
    held: HeldPop | None = None
    is_done: bool = False


@dataclass(slots=True, eq=False)
class WaitingNotification:
    """A client that waits until it could pop a message. It pops none.

    Attributes:
        topics: Topics whose new messages are a reason to look again.
        has_message: Returns True if it could.
        answer: Called once.
        deadline_ms: Of `Clock.steady_ms`.
        is_ordered: An acknowledgement is a reason to look again, too.
    """

    caller: Caller
    topics: tuple[str, ...]
    has_message: Callable[[], bool]
    answer: Callable[[bool], None]
    deadline_ms: int
    is_ordered: bool
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _OfConnection:
    """The waiting requests of one connection, in order of arrival."""

    pops: dict[WaitingPop, None] = field(default_factory=dict)
    notifications: dict[WaitingNotification, None] = field(default_factory=dict)


class ClientPops:
    """The waiting requests of the clients of one server. A `Service` for those that do not pop. Thread-safe.

    - The engine holds the pops. Here they are found by connection and by account.
    - The pops of a closed connection end without popping.

    Args:
        quota: Counts the waiting requests of each client, together with its held pulls.
    """

    name = "server.client_pops"

    def __init__(self, pops: PopService, store: MessageStore, clock: Clock, quota: Quota) -> None:
        self._pops = pops
        self._store = store
        self._clock = clock
        self._quota = quota
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._connections: dict[int, _OfConnection] = {}
        self._by_topic: dict[str, dict[WaitingNotification, None]] = {}
        self._watched: dict[str, Callable[[], None]] = {}
        self._changed_topics: set[str] = set()
        self._is_closed = False

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when `step` has work to do."""
        self._wake = wake

    # --- pops ----------------------------------------------------------------------------------

    def pop(
        self, caller: Caller, request: PopRequest, wait_ms: int, answer: Callable[[PopResult | None], None]
    ) -> None:
        """Pop messages for a client, or hold the pop until there are some.

        Args:
            answer: Called once with the result, perhaps in another thread; with None if the server ends the wait.

        Raises:
            RefusedError: The client has too many waiting requests, or the server is stopping.
        """
        waiting = WaitingPop(caller, request.group, request.topic, answer)
        with self._lock:
            self._of(caller).pops[waiting] = None
        try:
            waiting.held = self._pops.hold(request, wait_ms, partial(self._on_result, waiting))
        except BaseException:
            self._remove(waiting)
            raise
        if self._is_closed or not caller.connection.is_open:
            self._end(waiting)
        if waiting.is_done:  # another thread has ended it before the pop was held, and could not cancel it
            waiting.held.cancel()

    def _of(self, caller: Caller) -> _OfConnection:
        """Return the requests of a connection, and count one more. The lock is held."""
        if self._is_closed:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, "the server is stopping; try again later")
        self._quota.take(caller.owner)
        return self._connections.setdefault(caller.connection.id, _OfConnection())

    def _on_result(self, waiting: WaitingPop, result: PopResult) -> None:
        if self._remove(waiting):
            waiting.answer(result)
        else:
            self.release(waiting.group, waiting.topic, result)

    def release(self, group: str, topic: str, result: PopResult) -> None:
        """Make messages visible at once that could not be sent to their client."""
        for popped in result.messages:
            self._pops.change_invisible(group, topic, popped.handle, 0, _ignore, counts=False)

    def _remove(self, waiting: WaitingPop) -> bool:
        """Remove a held pop. Return False if another thread removed it before."""
        with self._lock:
            if waiting.is_done:
                return False
            waiting.is_done = True
            del self._connections[waiting.caller.connection.id].pops[waiting]
            self._removed(waiting.caller)
            return True

    def _removed(self, caller: Caller) -> None:
        """Count one request less. The lock is held."""
        self._quota.give(caller.owner)
        of_connection = self._connections[caller.connection.id]
        if not of_connection.pops and not of_connection.notifications:
            del self._connections[caller.connection.id]

    def _end(self, waiting: WaitingPop, *, answers: bool = False) -> None:
        """End a held pop without messages."""
        if self._remove(waiting):
            if waiting.held is not None:
                waiting.held.cancel()
            if answers:
                waiting.answer(None)

    # --- notifications -------------------------------------------------------------------------

    def notify(self, waiting: WaitingNotification) -> None:
        """Answer a notification when there is a message, or at its deadline.

        Raises:
            RefusedError: As `pop`.
        """
        with self._lock:
            self._of(waiting.caller).notifications[waiting] = None
            for topic in waiting.topics:
                self._by_topic.setdefault(topic, {})[waiting] = None
                if topic not in self._watched:
                    self._watched[topic] = callback = partial(self._on_new_messages, topic)
                    self._store.watch(topic, callback)
            self._changed_topics.add(waiting.topics[0])  # a message may have arrived before the topic was watched
        if not waiting.caller.connection.is_open:
            self.forget(waiting.caller.connection.id)
        self._wake()

    def _on_new_messages(self, topic: str) -> None:
        """Note that *topic* has new messages. The store calls this in each producer's thread, so it takes no lock."""
        if topic in self._by_topic and topic not in self._changed_topics:
            self._changed_topics.add(topic)
            self._wake()

    def step(self) -> int | None:
        """Answer the notifications that are due, and return when the next one may be."""
        # Only the topics that are in the set now: a topic with constant traffic must not block the others.
        changed = {self._changed_topics.pop() for _ in range(len(self._changed_topics))}
        now_ms = self._clock.steady_ms()
        with self._lock:
            waiting = [each for of in self._connections.values() for each in of.notifications]
        for each in waiting:
            has_message = (each.is_ordered or not changed.isdisjoint(each.topics)) and each.has_message()
            if (has_message or each.deadline_ms <= now_ms) and self._drop(each):
                each.answer(has_message)
        due = [each.deadline_ms for each in waiting if not each.is_done]
        if any(each.is_ordered and not each.is_done for each in waiting):
            due.append(now_ms + _RECHECK_MS)
        return self._clock.now_ms() if self._changed_topics else wall_time(self._clock, min(due, default=None))

    def _drop(self, waiting: WaitingNotification) -> bool:
        """Remove a notification. Return False if another thread removed it before."""
        with self._lock:
            if waiting.is_done:
                return False
            waiting.is_done = True
            for topic in waiting.topics:
                others = self._by_topic[topic]
                del others[waiting]
                if not others:
                    del self._by_topic[topic]
                    self._store.unwatch(topic, self._watched.pop(topic))
            del self._connections[waiting.caller.connection.id].notifications[waiting]
            self._removed(waiting.caller)
            return True

    # --- ends ----------------------------------------------------------------------------------

    def forget(self, connection: int) -> None:
        """End the requests of a closed connection. Nothing is popped for them any more."""
        pops, notifications = self._all([connection])
        for waiting in pops:
            self._end(waiting)
        for notification in notifications:
            self._drop(notification)

    def answer_for(self, accounts: Set[str]) -> None:
        """Answer the waiting requests of accounts whose rights have changed: their next ones are checked again."""
        self._answer(lambda caller: caller.account in accounts)

    def close(self) -> None:
        """Answer the waiting requests, and refuse more."""
        with self._lock:
            self._is_closed = True
        self._answer(lambda caller: True)

    def _answer(self, is_meant: Callable[[Caller], bool]) -> None:
        pops, notifications = self._all(list(self._connections))
        for waiting in pops:
            if is_meant(waiting.caller):
                self._end(waiting, answers=True)
        for notification in notifications:
            if is_meant(notification.caller) and self._drop(notification):
                notification.answer(False)

    def _all(self, connections: Iterable[int]) -> tuple[list[WaitingPop], list[WaitingNotification]]:
        with self._lock:
            found = [self._connections[each] for each in connections if each in self._connections]
            return [pop for of in found for pop in of.pops], [each for of in found for each in of.notifications]


def _ignore(_error: Exception | None) -> None:
    """Ignore that the message is visible: its client is gone, and no other waits for the result."""
