"""The old broker of a hand-over as the application sees it: its name, what groups have left there, and its thread."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mqtemplate.broker import Broker, ConsumerSpec, Registration
from mqtemplate.errors import BrokerError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.handover")
_T = TypeVar("_T")

OLD_PREFIX = "old:"
"""Prefix of the name of the old broker, as the application sees it."""


# --- names of the old broker ----------------------------------------------------------------------


def is_old(name: str) -> bool:
    """Return True if a broker name, or a receipt handle, is of the old broker."""
    return name.startswith(OLD_PREFIX)


def shown_queue(queue: MessageQueue) -> MessageQueue:
    """Return a queue of the old broker as the application sees it."""
    return MessageQueue(queue.topic, OLD_PREFIX + queue.broker_name, queue.queue_id)


def inner_queue(queue: MessageQueue) -> MessageQueue:
    """Return a queue of the old broker as that broker knows it."""
    return MessageQueue(queue.topic, queue.broker_name.removeprefix(OLD_PREFIX), queue.queue_id)


def shown_messages(messages: list[MessageExt]) -> list[MessageExt]:
    """Give messages that were read from the old broker the name of that broker which the application sees."""
    for message in messages:
        message.broker_name = OLD_PREFIX + message.broker_name
    return messages


def inner_message(message: MessageExt) -> MessageExt:
    """Return a copy of a message of the old broker as that broker knows it."""
    inner = copy.copy(message)
    inner.broker_name = message.broker_name.removeprefix(OLD_PREFIX)
    return inner


def shown_keys(found: Mapping[MessageQueue, _T]) -> dict[MessageQueue, _T]:
    """Return values by queues of the old broker, with the queues as the application sees them."""
    return {shown_queue(queue): value for queue, value in found.items()}


# --- order across both brokers --------------------------------------------------------------------

_CHECK_EMBEDDED_MS = 100
_CHECK_AWAY_MS = 10_000  # a request to a broker that is away may wait for its timeout
_CHECK_REMOTE_MS = 1_000  # the check sends two requests for each queue


class OldQueues:
    """Says whether a group has consumed what the old broker has of a topic, over all members of the group.

    A topic is drained if the committed offset of each of its queues, and of the group's retry topic, is the maximum.
    So the old broker must have the commits of all members: those of other processes too.

    - A delayed message that the old broker releases later closes the topic again until it is consumed. What the new
      broker had delivered before stays delivered.
    - While the old broker cannot be reached, the last result counts.

    Args:
        waits_for_pending: True: a topic with pending messages in the old broker is not drained either.
    """

    def __init__(self, old: Broker, group: str, *, waits_for_pending: bool) -> None:
        self._old = old
        self._group = group
        self._retry_topic = RETRY_TOPIC_PREFIX + group
        self._waits_for_pending = waits_for_pending
        self._checked: dict[str, tuple[int, bool]] = {}  # topic -> steady time of the next check, result of the last
        self._lock = threading.Lock()
        self._log = LimitedLog(_log, old.clock.steady_ms, burst=1)

    def are_drained(self, topic: str) -> bool:
        """Return True if queues of *topic* at the new broker may be read in their order."""
        now_ms = self._old.clock.steady_ms()
        with self._lock:
            next_ms, was_drained = self._checked.get(topic, (now_ms, False))
            if now_ms < next_ms:
                return was_drained
            answer = self._check(topic)
            is_drained = was_drained if answer is None else answer
            interval_ms = _CHECK_EMBEDDED_MS if self._old.is_embedded else _CHECK_REMOTE_MS
            interval_ms = _CHECK_AWAY_MS if answer is None else 0 if self._old.clock.is_virtual else interval_ms
            self._checked[topic] = now_ms + interval_ms, is_drained
        if is_drained != was_drained:
            _log.info("hand_over.topic_drained" if is_drained else "hand_over.topic_read_again", topic=topic)
        return is_drained

    def _check(self, topic: str) -> bool | None:
        """Return the answer of the old broker; None if it cannot be reached."""
        old = self._old
        try:
            queues = [queue for each in (topic, self._retry_topic) for queue in queues_of(old, each)]
            if not all(self._is_consumed(queue) for queue in queues):
                return False
            return not self._waits_for_pending or not old.delayed.count_pending(PendingQuery(topic=topic)).total
        except BrokerError as exc:
            self._log.warning("hand_over.old_broker_not_reached", topic=topic, group=self._group, reason=str(exc))
            return None

    def _is_consumed(self, queue: MessageQueue) -> bool:
        high = self._old.reader.max_offset(queue)
        committed = self._old.groups.committed_offset(self._group, queue)
        if committed is None:
            return self._old.reader.min_offset(queue) >= high
        return committed >= high


def has_topic(old: Broker, topic: str) -> bool:
    """Return False if the old broker does not have a topic, and would create it when it is read.

    A client does not create topics to read them, and other processes may create them at the server.
    """
    return not old.is_embedded or topic in old.admin().topic_kinds()


def queues_of(old: Broker, topic: str) -> Sequence[MessageQueue]:
    """Return the queues of a topic of the old broker; none if it does not exist."""
    return old.queues(topic) if has_topic(old, topic) else ()


def spec_at_old(old: Broker, spec: ConsumerSpec) -> ConsumerSpec | None:
    """Return the subscriptions of a member at the old broker; None if there is nothing to read."""
    known = {topic: selector for topic, selector in spec.subscriptions.items() if has_topic(old, topic)}
    if not known and not has_topic(old, RETRY_TOPIC_PREFIX + spec.group):
        return None
    return replace(spec, subscriptions=known)


# --- both at once ---------------------------------------------------------------------------------

WAKE_S = 0.01
"""Time between two wakes of a call that may not wait yet."""


class PollThread(Generic[_T]):
    """A thread that waits for messages of the old broker, while the caller waits for those of the new one."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], list[_T]] | None] = SimpleQueue()
        self._results: SimpleQueue[list[_T] | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self, poll: Callable[[], list[_T]]) -> None:
        """Start a poll. `end` returns its messages."""
        if not self._thread.is_alive():
            self._thread.start()
        self._jobs.put(poll)

    def end(self, wake: Callable[[], None]) -> list[_T] | BaseException:
        """Wait for the end of the poll; return its messages, or its error.

        Args:
            wake: Ends the wait of the poll. It is called again in case that the poll did not wait yet.
        """
        while True:
            wake()
            with contextlib.suppress(Empty):
                return self._results.get(timeout=WAKE_S)

    def stop(self) -> None:
        """End the thread."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (poll := self._jobs.get()) is not None:
            try:
                self._results.put(poll())
            except BaseException as error:  # the thread that waits for the result raises it
                self._results.put(error)


@dataclass(eq=False)
class Registrations:
    """Several registrations that are closed together. A `Registration`."""

    each: Sequence[Registration]

    def close(self) -> None:
        """Close all of them, also if one fails."""
        for closed, registration in enumerate(self.each, 1):
            try:
                registration.close()
            except BaseException:
                Registrations(self.each[closed:]).close()
                raise


def register_at_both(old: Callable[[], Registration], new: Callable[[], Registration]) -> Registration:
    """Register at both brokers, or at none."""
    first = old()
    try:
        return Registrations((first, new()))
    except BaseException:
        first.close()
        raise
