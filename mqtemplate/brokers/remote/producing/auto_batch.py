"""Sends messages in one request that are sent at the same time. RocketMQ: ``ProduceAccumulator``."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from mqtemplate.brokers.remote.producing.send_request import BatchPart, SendRequest, SendRequestFactory
from mqtemplate.errors import BrokerClosedError, MessageError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.results import SendResult

_REQUESTS = 2
"""With so many requests of a line on the way further messages wait: while one is stored, the next one is written."""
_LONGEST_WAIT_MS = 10.0
_MAX_MESSAGES = 64
"""Messages of one request; mqtemplate's server stores so many without a change of threads."""
_MAX_BYTES = 64 << 10
_MAX_LINES = 1_000


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
    """Lets one thread wait for the end of its send. A bare lock is the cheapest way to wait."""

    __slots__ = ("_error", "_lock", "_result")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._result: SendResult | None = None
        self._error: BaseException | None = None

    def set_result(self, result: SendResult) -> None:
        self._result = result
        self._lock.release()

    def set_exception(self, exception: BaseException) -> None:
        self._error = exception
        self._lock.release()

    def result(self) -> SendResult:
        """Wait for the end: each send has a timeout. Return the result, or raise the error."""
        self._lock.acquire()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class _Entry(NamedTuple):
    """A message that waits, or is in a request on the way."""

    part: BatchPart
    deadline: float
    outcome: Outcome


class AutoBatch:
    """The lines of a producer. Thread-safe."""

    def __init__(self, sends: AsyncSends) -> None:
        self._sends = sends
        self._lines: dict[tuple[str, int], Line] = {}

    def line(self, topic: str, timeout_ms: int) -> Line | None:
        """Return the line of the messages of one topic with one timeout; None if there are too many lines."""
        key = (topic, timeout_ms)
        found = self._lines.get(key)
        if found is None and len(self._lines) < _MAX_LINES:
            found = self._lines.setdefault(key, Line(self._sends, timeout_ms))
        return found

    def close(self) -> None:
        """Fail the messages that wait."""
        for line in list(self._lines.values()):
            line.close()


class Line:
    """Messages of one topic with one timeout. Thread-safe.

    - While few requests of the line are on the way, a message is sent alone and at once. Further ones wait for a
      response, for 10 ms at most, and leave in one request. So where few messages are sent none takes longer, and
      where many are sent they need few requests.
    - All have one timeout, so that none shortens that of another.
    - If a broker refuses the messages of a request together, each is sent alone, and has a result of its own.
    """

    def __init__(self, sends: AsyncSends, timeout_ms: int) -> None:
        self._sends = sends
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()  # protects the attributes that follow
        self._requests = 0
        self._max_requests: float = _REQUESTS
        self._waiting: deque[_Entry] = deque()
        self._refused: list[_Entry] = []  # they are sent alone soon
        self._is_timed = False
        self._is_closed = False

    def may_start(self) -> bool:
        """Return True if the caller may send its message alone and now. Then it has to call `ended`."""
        with self._lock:
            if self._requests >= self._max_requests:
                return False
            self._requests += 1
            return True

    def add(self, message: Message, outcome: Outcome) -> None:
        """Send a message with others.

        Raises:
            MessageError: It cannot be sent.
            BrokerClosedError: The client is closed.
        """
        entry = _Entry(self._sends.factory.part(message), time.monotonic() + self._timeout_ms / 1_000, outcome)
        with self._lock:
            if self._is_closed:
                raise _closed_error(entry)
            self._waiting.append(entry)
            entries = self._take() if self._requests < self._max_requests else []
            self._requests += bool(entries)
            starts_timer = not (entries or self._is_timed)
            self._is_timed |= starts_timer
        if entries:
            self._send(entries)
        elif starts_timer:
            self._sends.call_later(_LONGEST_WAIT_MS, self._on_time)

    def ended(self) -> None:
        """Send the messages that wait, since a request has ended."""
        with self._lock:
            entries = self._take()
            if not entries:
                self._requests -= 1
        if entries:
            self._send(entries)

    def _on_time(self) -> None:
        """Send messages that have waited long: the requests before take longer, or have lost their broker."""
        with self._lock:
            entries = self._take()
            self._requests += bool(entries)
            self._is_timed = is_timed = bool(self._waiting)
        if entries:
            self._send(entries)
        if is_timed:
            self._sends.call_later(_LONGEST_WAIT_MS, self._on_time)

    def _take(self) -> list[_Entry]:
        """Remove the messages of the next request."""
        entries: list[_Entry] = []
        size, waiting = 0, self._waiting
        while waiting and len(entries) < _MAX_MESSAGES:
            size += len(waiting[0].part.data)
            if entries and size > _MAX_BYTES:
                break
            entries.append(waiting.popleft())
        return entries

    def _send(self, entries: list[_Entry]) -> None:
        factory = self._sends.factory
        parts = [entry.part for entry in entries]
        request = factory.joined(parts) if len(parts) > 1 else factory.single(parts[0].message)
        self._sends.start(request, self._timeout_ms, entries[0].deadline, _Batch(self, entries, str(request)))

    def refused(self, entries: list[_Entry], *, for_good: bool) -> None:
        """Send each message alone that a broker refused together with the others.

        Args:
            for_good: The broker accepts no batches of the topic, so the line makes no more.
        """
        with self._lock:
            if for_good:
                self._max_requests = float("inf")
            self._refused += entries
        self._sends.call_later(0, self._send_singly)

    def failed(self) -> None:
        """Do as `ended`, later: the next request may fail at once like this one."""
        self._sends.call_later(0, self.ended)

    def _send_singly(self) -> None:
        with self._lock:
            entries, self._refused = self._refused, []
        for part, deadline, outcome in entries:
            self._sends.start(self._sends.factory.single(part.message), self._timeout_ms, deadline, outcome)

    def close(self) -> None:
        """Fail the messages that wait."""
        with self._lock:
            self._is_closed = True
            entries = [*self._refused, *self._waiting]
            self._refused = []
            self._waiting.clear()
        for entry in entries:
            entry.outcome.set_exception(_closed_error(entry))


@dataclass(slots=True, eq=False)
class _Batch:
    """One request on the way: it passes its end to the messages."""

    line: Line
    entries: list[_Entry]
    name: str

    def set_result(self, result: SendResult) -> None:
        self.line.ended()  # first, so that the broker has work while the senders of these messages go on
        offset_msg_ids = result.offset_msg_id.split(",")
        for number, (part, _, outcome) in enumerate(self.entries):
            outcome.set_result(
                replace(
                    result,
                    msg_id=part.msg_id,
                    offset_msg_id=offset_msg_ids[number] if number < len(offset_msg_ids) else "",
                    queue_offset=result.queue_offset + number,
                )
            )

    def set_exception(self, exception: BaseException) -> None:
        self.line.failed()
        is_unsupported = isinstance(exception, UnsupportedError)
        if len(self.entries) > 1 and (is_unsupported or isinstance(exception, MessageError)):
            self.line.refused(self.entries, for_good=is_unsupported)
            return
        for entry in self.entries:
            error = copy.copy(exception)  # several threads may raise it
            error.args = (str(exception).replace(self.name, _name(entry)),)
            error.__cause__ = exception.__cause__
            entry.outcome.set_exception(error)


def _name(entry: _Entry) -> str:
    return f"send message {entry.part.msg_id} to {entry.part.message.topic!r}"


def _closed_error(entry: _Entry) -> BrokerClosedError:
    return BrokerClosedError(f"{_name(entry)}: the client was closed before it was sent; create another client")
