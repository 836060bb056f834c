"""Failures of servers: the log of those that do not answer, the search for lost brokers, and responses as errors.

Source: RocketMQ ``remoting: ResponseCode``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.clock import Clock
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerError,
    DelayError,
    MessageError,
    MQTemplateError,
    PendingKeyError,
    PendingKeyUnknownError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendError,
    UnsupportedError,
)
from mqtemplate.event_log import EventLogger, get_logger
from mqtemplate.remoting.protocol.bodies.own_requests import PendingErrorData, Refusal, RefusalHeader
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.services import wall_time

# --- log of outages -------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

SUMMARY_MS = 30_000
UNANSWERED = (RemoteConnectError, RemoteTimeoutError)
"""Errors of a request that got no response."""


def log_failure(log: EventLogger, event: str, error: object, *, always: bool = False, **fields: Any) -> None:
    """Log a failed action as a warning; at level DEBUG if no server answered, since `Outages` has logged that.

    Args:
        always: Write a warning in any case.
    """
    write = log.debug if isinstance(error, UNANSWERED) and not always else log.warning
    write(event, reason=str(error), **fields)


@dataclass(slots=True)
class _SilentServer:
    """One server that does not answer.

    Attributes:
        reason: Why the first request failed.
        recent: Requests without a response since the last line of the log.
    """

    reason: str
    recent: int = 0


class Outages:
    """The brokers and name servers of a cluster that do not answer. A `Service`, for the line each half minute.

    An outage starts when the first server does not answer and ends when all of them answer. A server to which no
    request is sent any more, such as a removed broker, does not count longer than a minute.

    A thread may report a result late. So a request that was sent before an outage started does not end it, and one that
    was sent before it ended does not start the next one.

    Args:
        request_timeout_ms: Usual time limit of requests. One with a shorter limit, such as a send with a timeout of its
            own, proves no outage when it has no response in time.

    Attributes:
        is_open: True during an outage. Hot paths read it before they report a response.
        changes: Number of starts and ends of outages; a request notes it when it is sent.
    """

    name = "remote.outages"

    def __init__(self, clock: Clock, request_timeout_ms: int = 0) -> None:
        self.is_open = False
        self.changes = 0
        self._clock = clock
        self._request_timeout_ms = request_timeout_ms
        self._lock = threading.Lock()
        self._silent: dict[str, _SilentServer] = {}
        self._failures = 0
        self._started_ms = 0
        self._summary_ms = 0
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def report(self, address: str, error: Exception | None, seen: int, timeout_ms: int | None = None) -> None:
        """Log the start or the end of an outage after the result of a request.

        Args:
            error: None for a response. An error of another kind than `UNANSWERED` proves nothing.
            seen: *changes* when the request was sent.
            timeout_ms: Time limit of the request; None if it had time enough.
        """
        if error is None:
            if self.is_open:
                self._answered(address, seen)
        elif isinstance(error, UNANSWERED):
            is_short = timeout_ms is not None and timeout_ms < self._request_timeout_ms
            if isinstance(error, RemoteConnectError) or not is_short:
                self._failed(address, error, seen)

    def _failed(self, address: str, error: Exception, seen: int) -> None:
        with self._lock:
            starts = not self._silent
            if starts and seen != self.changes:
                return
            silent = self._silent.setdefault(address, _SilentServer(str(error)))
            silent.recent += 1
            if starts:
                self.is_open, self._failures = True, 0
                self.changes += 1
                self._started_ms = self._clock.steady_ms()
                self._summary_ms = self._started_ms + SUMMARY_MS
            self._failures += 1
        if starts:
            _log.warning("remote.outage_started", server=address, reason=str(error))
            self._wake()

    def _answered(self, address: str, seen: int) -> None:
        with self._lock:
            if seen != self.changes:
                return
            if self._silent.pop(address, None) is None or self._silent:
                return
            self.is_open = False
            self.changes += 1
            outage_ms, failures = self._clock.steady_ms() - self._started_ms, self._failures
        _log.info("remote.reconnected", server=address, outage_ms=outage_ms, failed_requests=failures)

    def describe(self) -> str | None:
        """Return the servers that do not answer, each with the reason; None if all do."""
        with self._lock:
            silent = [f"{address}: {each.reason}" for address, each in sorted(self._silent.items())]
        return "; ".join(silent) or None

    def step(self) -> int | None:
        """Log the outage if half a minute has passed; return the time of the next line."""
        with self._lock:
            if not self.is_open:
                return None
            if self._clock.steady_ms() < self._summary_ms:
                return wall_time(self._clock, self._summary_ms)
            self._silent = {address: silent for address, silent in self._silent.items() if silent.recent}
            self.is_open = bool(self._silent)
            self.changes += not self.is_open
            self._summary_ms += SUMMARY_MS
            outage_ms, failures = self._clock.steady_ms() - self._started_ms, self._failures
            silent = {address: each.reason for address, each in self._silent.items()}
            for each in self._silent.values():
                each.recent = 0
        if silent:
            _log.warning(
                "remote.outage_continued",
                servers=sorted(silent),
                outage_ms=outage_ms,
                failed_requests=failures,
                reason=next(iter(silent.values())),
            )
            return wall_time(self._clock, self._summary_ms)
        _log.info("remote.outage_dropped", outage_ms=outage_ms, reason="no request is sent to these servers any more")
        return None


# --- lost brokers ---------------------------------------------------------------------------------


FOLLOW_MS = 600_000
"""Time for which a broker that is in no route any more is looked for."""


@dataclass(frozen=True, slots=True)
class _LostBroker:
    broker_name: str
    broker_id: int
    since_ms: int


class LostBrokers:
    """The brokers of a client that are away. Thread-safe.

    A broker is back when it is in a route at this address, and has answered a heartbeat. It is forgotten when the
    routes have another address for it, or after some minutes without a route.

    Attributes:
        is_empty: True if no broker is away. Hot paths read it.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_empty = True
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: dict[str, _LostBroker] = {}

    def add(self, address: str, brokers: Mapping[str, Mapping[int, str]]) -> str | None:
        """Note that the connection to *address* was lost or refused.

        Args:
            brokers: Brokers of the routes: name -> id -> address.

        Returns:
            The name of the broker, or None if no broker has this address, or it is known to be away.
        """
        with self._lock:
            if address in self._lost:
                return None
            for name, by_id in brokers.items():
                for broker_id, at in by_id.items():
                    if at == address:
                        self._lost[address] = _LostBroker(name, broker_id, self._clock.steady_ms())
                        self.is_empty = False
                        return name
        return None

    def update(self, brokers: Mapping[str, Mapping[int, str]], answered: Callable[[], frozenset[str]]) -> None:
        """Remove the brokers that are back, and those that need not be looked for any more.

        Args:
            answered: Returns the addresses that have answered a heartbeat since they were lost. A loss after the call
                is a new one.
        """
        with self._lock:
            back = answered()
            self._lost = {
                address: lost
                for address, lost in self._lost.items()
                if self._is_away(address, lost, brokers.get(lost.broker_name, {}), back)
            }
            self.is_empty = not self._lost

    def _is_away(self, address: str, lost: _LostBroker, by_id: Mapping[int, str], answered: frozenset[str]) -> bool:
        current = by_id.get(lost.broker_id)
        if current is None:
            return self._clock.steady_ms() - lost.since_ms < FOLLOW_MS
        return current == address and address not in answered


# --- responses as errors: the failed operation, the response, and advice --------------------------


RETRY_ELSEWHERE = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)
"""Responses to a send after which another queue or broker may accept the message. Source: ``DefaultMQProducer``."""

_ADVICE = {
    ResponseCode.SYSTEM_BUSY: "it is overloaded; try again later, or give it more send threads",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "it does not have this request; if it is an old broker, use a newer "
    "broker, and if it is a proxy, set rocketmq.name-server to the name servers of the brokers",
    ResponseCode.SERVICE_NOT_AVAILABLE: "it accepts nothing now: its disk is full, it is a replica, or it shuts down",
    ResponseCode.NO_PERMISSION: "the topic's permission or access control forbids it; check the topic's perm, "
    "access-key and secret-key, and the rights of the account",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic (mqadmin updateTopic, or Broker.create_topic), or set "
    "autoCreateTopicEnable=true on the broker",
    ResponseCode.SUBSCRIPTION_NOT_EXIST: "the broker has no such subscription yet; the next heartbeat registers it",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group (mqadmin updateSubGroup), or set "
    "autoCreateSubscriptionGroup=true on the broker",
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: "write the selector in the syntax of the broker's version",
    ResponseCode.FLOW_CONTROL: "it is overloaded; try again later",
}
_KINDS: dict[int, type[BrokerError]] = {
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: UnsupportedError,
    ResponseCode.SYSTEM_BUSY: BrokerBusyError,
    ResponseCode.FLOW_CONTROL: BrokerBusyError,
}
_INVALID_MESSAGE = frozenset({ResponseCode.MESSAGE_ILLEGAL, ResponseCode.INVALID_PARAMETER})
# Remarks of MESSAGE_ILLEGAL. Source: RocketMQ ``broker: SendMessageProcessor``, ``proxy:
# DefaultTopicMessageTypeValidator``.
_TOO_FAR = "timer message illegal"
_OTHER_TYPE = "TopicMessageType"
_TYPE_ADVICE = (
    "a proxy accepts one type of messages for a topic; set it to MIXED (mqadmin updateTopic -a +message.type=MIXED), "
    "or use a topic of the type of the message (DELAY with a delay, FIFO with a hash_key)"
)


def check_response(
    response: RemotingCommand, operation: str, address: str, accept: Collection[int] = (ResponseCode.SUCCESS,)
) -> RemotingCommand:
    """Return *response* if its code is SUCCESS, or another one of *accept*.

    Raises:
        BrokerError: The code is another one; `UnsupportedError` if this broker can never execute the request,
            `BrokerBusyError` if it is overloaded.
    """
    if response.code not in accept:
        raise response_error(response, operation, address)
    return response


def response_error(response: RemotingCommand, operation: str, address: str) -> BrokerError:
    """Return the error for a response that is not a success.

    Args:
        operation: What the request was for, such as "read queue 1 of orders".
    """
    kind = _KINDS.get(response.code, BrokerError)
    return kind(f"{operation}: {refusal_text(response, address)}")


def send_error(response: RemotingCommand, operation: str, address: str, *, has_timer: bool) -> MQTemplateError:
    """Return the error for a message that the broker refused.

    Its class tells an invalid message (`MessageError`), a missing feature of the broker (`UnsupportedError`), and a
    failure that may pass (`SendError`) apart.

    Args:
        has_timer: The message has a delay that is not a level.
    """
    kind: type[MQTemplateError] = SendError
    reason = refusal_text(response, address)
    # RocketMQ has no code of its own for this. Source: SendMessageProcessor, WHEEL_TIMER_NOT_ENABLE.
    if has_timer and response.code == ResponseCode.SYSTEM_ERROR and "timerWheelEnable" in (response.remark or ""):
        kind, reason = UnsupportedError, f"{reason}; set timerWheelEnable=true on the broker, or use a delay level"
    elif response.code == ResponseCode.MESSAGE_ILLEGAL and _OTHER_TYPE in (response.remark or ""):
        kind, reason = MessageError, f"{reason}; {_TYPE_ADVICE}"
    elif has_timer and response.code == ResponseCode.MESSAGE_ILLEGAL:
        kind = DelayError
        if _TOO_FAR in (response.remark or ""):  # a server of this library names its own limit and setting
            reason = f"{reason}; the limit is the broker's timerMaxDelaySec (3 days by default)"
    elif response.code in _INVALID_MESSAGE:
        kind = MessageError
    elif response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        kind = UnsupportedError
    return kind.during(operation, reason)


def pending_key_error(
    response: RemotingCommand, namespace: Namespace, operation: str, address: str
) -> PendingKeyError | PendingKeyUnknownError | None:
    """Return the error for a message that was refused because of its pending key; None for another reason.

    Another message is pending under the key, or the broker cannot know if one is.
    """
    refusal = response.header(RefusalHeader)
    if refusal.refusal == Refusal.PENDING_KEY_UNKNOWN:
        return PendingKeyUnknownError.during(operation, refusal_text(response, address))
    if refusal.refusal != Refusal.PENDING_KEY or refusal.pending is None:
        return None
    data = PendingErrorData.decode(refusal.pending.encode())
    return PendingKeyError(data.key, namespace.unwrap(data.topic), data.handle, data.msg_id, data.deliver_time)


def refusal_text(response: RemotingCommand, address: str) -> str:
    """Return the address that answered, the response, and advice."""
    code = ResponseCode.of(response.code)
    name = f"{response.code} {code.name}" if isinstance(code, ResponseCode) else str(response.code)
    remark = f": {response.remark}" if response.remark else ""
    advice = f"; {_ADVICE[code]}" if isinstance(code, ResponseCode) and code in _ADVICE else ""
    return f"{address} answered {name}{remark}{advice}"
