"""A send as one value, `SendCall`, and the way that it takes: wrappers, and after them the broker's method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, TypeAlias

from mqtemplate.broker.broker import Broker
from mqtemplate.calls.steps import chained
from mqtemplate.clock import Clock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.results import SendResult


class SendKind(StrEnum):  # text, since the hash of another enum is a function of Python
    """Kind of a send: the method of the broker that it goes to, and the verb that middlewares see."""

    SEND = "send"
    BATCH = "batch"
    ASYNC = "async"
    ONE_WAY = "one_way"
    HALF = "transaction"
    REQUEST = "request"

    @property
    def verb(self) -> str:
        """``send``, ``one_way``, ``transaction`` or ``request``. All sending methods are one of these."""
        return "send" if self in (SendKind.BATCH, SendKind.ASYNC) else self.value


SEND, BATCH, ASYNC, ONE_WAY, HALF, REQUEST = SendKind
"""The kinds for paths of each send: in Python 3.11 an attribute of an enum is a call of a function."""
LATER = frozenset({ASYNC, REQUEST})
"""Kinds whose result is a future."""


class SendCall:
    """One call of a broker's sending method. It is not changed: `map` and `filter` return others.

    Middlewares know it as `Outgoing`.

    Attributes:
        kind: Kind of the send.
        messages: One message, or the messages of a batch, with body and properties as the broker gets them.
        queue: The selected queue; None if the broker selects it.
        timeout_ms: The rest of the caller's timeout. It means nothing to a one-way send.
        clock: Clock of the broker.
        group: Producer group of a transaction.
    """

    # A class with slots: a NamedTuple takes twice as long to create, a frozen dataclass six times (measured).
    __slots__ = ("clock", "group", "kind", "messages", "queue", "timeout_ms")

    def __init__(
        self,
        kind: SendKind,
        messages: Sequence[Message],
        queue: MessageQueue | None,
        timeout_ms: int,
        clock: Clock,
        group: str = "",
    ) -> None:
        self.kind = kind
        self.messages = messages
        self.queue = queue
        self.timeout_ms = timeout_ms
        self.clock = clock
        self.group = group

    def __repr__(self) -> str:
        return f"<Outgoing {self.verb} of {len(self.messages)} message(s)>"

    @property
    def verb(self) -> str:
        """``send``, ``one_way``, ``transaction`` or ``request``. All sending methods are one of these."""
        return self.kind.verb

    @property
    def message(self) -> Message:
        """The message; the first one of a batch."""
        return self.messages[0]

    def replace(self, **changes: Any) -> SendCall:
        """Return the call with other attributes."""
        return SendCall(**{name: getattr(self, name) for name in SendCall.__slots__} | changes)

    def map(self, change: Callable[[Message], Message]) -> SendCall:
        """Return it with other messages: *change* may change a message, or return another one."""
        return self.replace(messages=[change(message) for message in self.messages])

    def filter(self, keep: Callable[[Message], bool]) -> SendCall:
        """Return it with the messages for which *keep* returns True. Without any left nothing is sent."""
        return self.replace(messages=[message for message in self.messages if keep(message)])


Outgoing = SendCall
"""A `SendCall`, as middlewares call it."""

SendNext: TypeAlias = Callable[[SendCall], Any]
"""The rest of the way of a send. It returns the result of the broker's method: a future for the kinds in `LATER`."""
SendWrapper: TypeAlias = Callable[[SendNext], SendNext]
"""Function that returns a `SendNext` with something around another one."""

_METHODS: dict[SendKind, Callable[[Broker], SendNext]] = {
    SEND: lambda broker: lambda call: broker.sends.send(call.messages[0], call.queue, call.timeout_ms),
    BATCH: lambda broker: lambda call: broker.sends.send_batch(call.messages, call.queue, call.timeout_ms),
    ASYNC: lambda broker: lambda call: broker.sends.send_async(call.messages, call.queue, call.timeout_ms),
    ONE_WAY: lambda broker: lambda call: broker.sends.send_one_way(call.messages[0], call.queue),
    HALF: lambda broker: lambda call: broker.sends.send_half(call.messages[0], call.group, call.queue, call.timeout_ms),
    REQUEST: lambda broker: lambda call: broker.requests.request(call.messages[0], call.queue, call.timeout_ms),
}
"""The broker's method for each kind."""


class SendPipeline:
    """The sends of one template: wrappers around the methods of a broker.

    Args:
        wrappers: The first one is outermost.

    Attributes:
        call: The one method through which all sends go.
        send: Sends one message. Without anything around the sends it goes to the broker at once: most sends are these.
    """

    def __init__(self, broker: Broker, wrappers: Iterable[SendWrapper] = ()) -> None:
        methods, wrap = {kind: method(broker) for kind, method in _METHODS.items()}, chained(tuple(wrappers))
        direct = _sending(methods)
        self.call = wrap(direct)
        self.send = _send_direct(broker) if self.call is direct else _send_one(wrap(methods[SEND]), broker.clock)


def _send_direct(broker: Broker) -> Callable[[Message, MessageQueue | None, int], SendResult]:
    def send(message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        return broker.sends.send(message, queue, timeout_ms)  # a client of a cluster has no `sends` before its start

    return send


def _send_one(call: SendNext, clock: Clock) -> Callable[[Message, MessageQueue | None, int], SendResult]:
    def send(message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        return call(SendCall(SEND, (message,), queue, timeout_ms, clock))  # type: ignore[no-any-return]

    return send


def _sending(methods: Mapping[SendKind, SendNext]) -> SendNext:
    """Return the end of the way of all sends: the broker's methods."""

    def send(call: SendCall) -> Any:
        return methods[call.kind](call)

    return send


def send_and_note(next_: SendNext, call: SendCall, note: Callable[[Any, BaseException | None], object]) -> Any:
    """Send, and report the outcome: at once, or when the future of the send is done.

    Args:
        note: Gets the result, or the error. For a future that was cancelled it gets neither.
    """
    try:
        result = next_(call)
    except BaseException as error:
        note(None, error)
        raise
    if call.kind in LATER:
        result.add_done_callback(lambda done: note(*_outcome(done)))
    else:
        note(result, None)
    return result


def _outcome(done: Future[Any]) -> tuple[Any, BaseException | None]:
    if done.cancelled():
        return None, None
    error = done.exception()
    return (done.result(), None) if error is None else (None, error)
