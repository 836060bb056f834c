"""Sends messages in one request that are sent at the same time. RocketMQ: ``ProduceAccumulator``.

A signal wakes each thread whose message was in the request. A thread that releases a lock keeps the interpreter lock:
the thread that it woke runs on another processor, and has to sleep again at once. To write to an ``eventfd`` is a
system call without the interpreter lock, so the woken thread can go on. Where one thread wakes many, as for the
messages of one request, a third more of them are sent.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from mqtemplate.brokers.remote.producing.send_request import JoinableMessage, SendRequest, SendRequestFactory
from mqtemplate.errors import BrokerClosedError, MessageError, MQTemplateError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.results import SendResult

# --- signals that wake one thread each ------------------------------------------------------------


class ThreadSignal(Protocol):
    """Wakes the thread that took it, once."""

    def set(self) -> None:
        """Wake the thread, or let its `wait` return at once."""

    def wait(self) -> None:
        """Return when `set` was called."""


class LockSignal:
    """Signal for systems without ``eventfd``."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


if sys.platform == "linux":

    class EventSignal:
        """Signal with a file descriptor. It is closed when neither side has the signal any more.

        Raises:
            OSError: The process has too many open files.
        """

        __slots__ = ("_fd",)

        def __init__(self) -> None:
            self._fd = -1
            self._fd = os.eventfd(0)

        def __del__(self) -> None:
            if self._fd >= 0:
                os.close(self._fd)

        def set(self) -> None:
            os.eventfd_write(self._fd, 1)

        def wait(self) -> None:
            os.eventfd_read(self._fd)


class _Kept(threading.local):
    signal: ThreadSignal | None = None


_kept = _Kept()


def _forget() -> None:
    """Use no signal of the parent process in a forked child: both would have one counter."""
    _kept.signal = None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget)


def take_signal() -> ThreadSignal:
    """Return a signal for one `ThreadSignal.wait` of this thread. Nothing else has it, not even a signal handler."""
    signal, _kept.signal = _kept.signal, None
    return _new_signal() if signal is None else signal


def keep_signal(signal: ThreadSignal) -> None:
    """Keep a signal after its `ThreadSignal.wait` has returned, for the next `take_signal` of this thread."""
    _kept.signal = signal


def _new_signal() -> ThreadSignal:
    # Where locks were replaced (gevent), greenlets stand for threads, and a system call would block all of them.
    if sys.platform == "linux" and type(threading.Lock()).__module__ == "_thread":
        try:
            return EventSignal()
        except OSError:
            return LockSignal()
    return LockSignal()


# --- joined sends ---------------------------------------------------------------------------------


_FEW_MESSAGES = 4
"""With this many messages on the way to a fast broker, further ones wait. Fewer threads are faster without batches."""
_FAST_MS = 0.3
_MESSAGES_PER_MS = 64
"""This many more may be on the way for each further millisecond that a broker needs: waiting costs throughput there."""
_MESSAGE_S = 0.00002
"""Time of a message within a request, of client and broker."""
_WINDOW = 1_000
_LONGEST_WAIT_MS = 10.0
_MAX_MESSAGES = 64
"""Messages of one request; mqtemplate's server stores this many without a change of threads."""
_MAX_BYTES = 64 << 10
_MAX_ACCUMULATORS = 1_000


class Outcome(Protocol):
    """Receives the end of a send: one of the two is called once."""

    def set_result(self, result: SendResult, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class AsyncSends(Protocol):
    """The part of a producer that sends requests."""

    @property
    def factory(self) -> SendRequestFactory: ...

    def start(self, request: SendRequest, timeout_ms: int, deadline: float, outcome: Outcome) -> None:
        """Send without waiting, in any thread."""

    def call_later(self, delay_ms: float, work: Callable[[], None]) -> None:
        """Call *work* in the I/O thread, unless the client is closed before."""


class ThreadOutcome:
    """Lets one thread wait for the end of its send."""

    __slots__ = ("_end", "_signal")

    def __init__(self) -> None:
        self._end: SendResult | BaseException | None = None
        self._signal = take_signal()

    def set_result(self, result: SendResult) -> None:
        """Set the result, once, and wake the thread."""
        self._end = result
        self._signal.set()

    def set_exception(self, exception: BaseException) -> None:
        """Set the error, once, and wake the thread."""
        self._end = exception
        self._signal.set()

    def get(self) -> SendResult:
        """Wait for the end: each send has a timeout. Return the result, or raise the error. Call it once."""
        self._signal.wait()
        keep_signal(self._signal)
        if isinstance(self._end, BaseException):
            raise self._end
        assert self._end is not None
        return self._end


class AccumulatedMessage(NamedTuple):
    """A message that waits, or is in a request on the way."""

    message: JoinableMessage
    deadline: float
    outcome: Outcome


class AutoBatch:
    """The messages of a producer that wait for others. Thread-safe."""

    def __init__(self, sends: AsyncSends) -> None:
        self._sends = sends
        self._accumulators: dict[tuple[str, int], MessageAccumulator] = {}

    def accumulator(self, topic: str, timeout_ms: int) -> MessageAccumulator | None:
        """Return the accumulator of the messages of one topic with one timeout; None if there are too many."""
        key = (topic, timeout_ms)
        found = self._accumulators.get(key)
        if found is None and len(self._accumulators) < _MAX_ACCUMULATORS:
            found = self._accumulators.setdefault(key, MessageAccumulator(self._sends, timeout_ms))
        return found

    def close(self) -> None:
        """Fail the messages that wait."""
        for accumulator in list(self._accumulators.values()):
            accumulator.close()


class RoundTrip:
    """The shortest time of the recent requests, and the number of messages that it allows.

    The shortest, because the others contain the time for which a busy client does not read the response.

    Attributes:
        max_messages: With this many messages on the way, further ones wait.
    """

    def __init__(self) -> None:
        self.max_messages = _FEW_MESSAGES
        self._shortest_s = self._shortest_of_window_s = float("inf")
        self._count = 0

    def add(self, seconds: float, messages: int) -> None:
        """Count a request with its number of messages."""
        seconds -= messages * _MESSAGE_S
        self._count += 1
        self._shortest_of_window_s = min(self._shortest_of_window_s, seconds)
        if self._count >= _WINDOW:
            self._shortest_s, self._shortest_of_window_s, self._count = self._shortest_of_window_s, float("inf"), 0
        elif seconds >= self._shortest_s:
            return
        self._shortest_s = min(self._shortest_s, seconds)
        self.max_messages = _FEW_MESSAGES + int(max(self._shortest_s * 1_000 - _FAST_MS, 0) * _MESSAGES_PER_MS)


class MessageAccumulator:
    """Messages of one topic with one timeout. Thread-safe.

    - While few of its messages are on the way, a message is sent alone and at once. Further ones wait for
      responses, for 10 ms at most, and leave in one request. So where few messages are sent they take no longer, and
      where many are sent they need few requests.
    - All have one timeout, so that no message shortens the timeout of another one.
    - If a broker refuses the messages of a request together, each is sent alone, and has a result of its own.
    """

    def __init__(self, sends: AsyncSends, timeout_ms: int) -> None:
        self._sends = sends
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()  # protects the attributes that follow
        self._on_the_way = 0  # messages
        self._round_trip = RoundTrip()
        self._joins = True
        self._waiting: deque[AccumulatedMessage] = deque()
        self._refused: list[AccumulatedMessage] = []  # they are sent alone soon
        self._is_timed = False
        self._is_closed = False

    def may_start(self) -> bool:
        """Return True if the caller may send its message alone and now. Then it has to call `ended`."""
        with self._lock:
            if self._must_wait():
                return False
            self._on_the_way += 1
            return True

    def _must_wait(self) -> bool:
        return self._joins and self._on_the_way >= self._round_trip.max_messages

    def add(self, message: Message, outcome: Outcome) -> None:
        """Send a message with others.

        Raises:
            MessageError: It cannot be sent.
            BrokerClosedError: The client is closed.
        """
        entry = AccumulatedMessage(
            self._sends.factory.joinable(message), time.monotonic() + self._timeout_ms / 1_000, outcome
        )
        with self._lock:
            if self._is_closed:
                raise _closed_error(entry)
            self._waiting.append(entry)
            entries = [] if self._must_wait() else self._take()
            starts_timer = not (entries or self._is_timed)
            self._is_timed |= starts_timer
        if entries:
            self._send(entries)
        elif starts_timer:
            self._sends.call_later(_LONGEST_WAIT_MS, self._on_time)

    def ended(self, count: int = 1, round_trip_s: float | None = None) -> None:
        """Note that a request has ended, and send messages that wait.

        Args:
            count: Number of its messages.
            round_trip_s: Time until its response; None without a response.
        """
        with self._lock:
            self._on_the_way -= count
            if round_trip_s is not None:
                self._round_trip.add(round_trip_s, count)
            entries = [] if self._must_wait() else self._take()
        if entries:
            self._send(entries)

    def _on_time(self) -> None:
        """Send messages that have waited long: the requests before take longer, or have lost their broker."""
        with self._lock:
            entries = self._take()
            self._is_timed = is_timed = bool(self._waiting)
        if entries:
            self._send(entries)
        if is_timed:
            self._sends.call_later(_LONGEST_WAIT_MS, self._on_time)

    def _take(self) -> list[AccumulatedMessage]:
        """Remove the messages of the next request from those that wait."""
        entries: list[AccumulatedMessage] = []
        size, waiting = 0, self._waiting
        while waiting and len(entries) < _MAX_MESSAGES:
            size += len(waiting[0].message.data)
            if entries and size > _MAX_BYTES:
                break
            entries.append(waiting.popleft())
        self._on_the_way += len(entries)
        return entries

    def _send(self, entries: list[AccumulatedMessage]) -> None:
        factory = self._sends.factory
        messages = [entry.message for entry in entries]
        batch = _JoinedOutcome(self, entries, time.monotonic())
        try:
            request = factory.joined(messages) if len(messages) > 1 else factory.alone(messages[0])
        except MessageError as exc:  # in any thread, so each outcome has to get it
            batch.set_exception(exc)
        else:
            self._sends.start(request, self._timeout_ms, entries[0].deadline, batch)

    def refused(self, entries: list[AccumulatedMessage], *, for_good: bool) -> None:
        """Send each message alone that a broker refused together with the others.

        Args:
            for_good: The broker accepts no batches of the topic, so no more are joined.
        """
        with self._lock:
            if for_good:
                self._joins = False
            is_closed = self._is_closed
            if not is_closed:
                self._refused += entries
        if is_closed:
            _fail(entries)
        else:
            self._sends.call_later(0, self._send_singly)

    def failed(self, count: int) -> None:
        """Do as `ended`, later: the next request may fail at once like this one."""
        self._sends.call_later(0, partial(self.ended, count))

    def _send_singly(self) -> None:
        with self._lock:
            entries, self._refused = self._refused, []
        for message, deadline, outcome in entries:
            try:
                request = self._sends.factory.alone(message)
            except MessageError as exc:
                outcome.set_exception(exc)
            else:
                self._sends.start(request, self._timeout_ms, deadline, outcome)

    def close(self) -> None:
        """Fail the messages that wait."""
        with self._lock:
            self._is_closed = True
            entries = [*self._refused, *self._waiting]
            self._refused = []
            self._waiting.clear()
        _fail(entries)


@dataclass(slots=True, eq=False)
class _JoinedOutcome:
    """One request on the way. It passes its result, or its error, to the messages."""

    accumulator: MessageAccumulator
    entries: list[AccumulatedMessage]
    started_s: float

    def set_result(self, result: SendResult) -> None:
        # First, so that the broker has work while the senders of these messages go on.
        self.accumulator.ended(len(self.entries), time.monotonic() - self.started_s)
        offset_msg_ids = result.offset_msg_id.split(",")
        for number, (message, _, outcome) in enumerate(self.entries):
            outcome.set_result(
                SendResult(
                    result.send_status,
                    message.msg_id,
                    offset_msg_ids[number] if number < len(offset_msg_ids) else "",
                    result.message_queue,
                    result.queue_offset + number,
                    region_id=result.region_id,
                    trace_on=result.trace_on,
                )
            )

    def set_exception(self, exception: BaseException) -> None:
        self.accumulator.failed(len(self.entries))
        is_unsupported = isinstance(exception, UnsupportedError)
        if len(self.entries) > 1 and (is_unsupported or isinstance(exception, MessageError)):
            self.accumulator.refused(self.entries, for_good=is_unsupported)
            return
        for entry in self.entries:
            if isinstance(exception, MQTemplateError):
                entry.outcome.set_exception(exception.of_part(_name(entry)))
            else:
                entry.outcome.set_exception(copy.copy(exception))  # several threads may raise it


def _name(entry: AccumulatedMessage) -> str:
    return f"send message {entry.message.msg_id} to {entry.message.topic!r}"


def _fail(entries: list[AccumulatedMessage]) -> None:
    for entry in entries:
        entry.outcome.set_exception(_closed_error(entry))


def _closed_error(entry: AccumulatedMessage) -> BrokerClosedError:
    reason = "the client was closed before it was sent; create another client"
    return BrokerClosedError.during(_name(entry), reason)
