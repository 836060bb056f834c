"""Tries of one send to a broker, in both protocols: which failures are repeated, and the error after the last one.

Source: RocketMQ ``client: DefaultMQProducerImpl``.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from mqtemplate.brokers.remote.cluster.failures import refusal_text, send_error
from mqtemplate.brokers.remote.cluster.routes import MissingTopicError
from mqtemplate.brokers.remote.producing.send_request import SendRequest
from mqtemplate.durations import format_ms
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerError,
    MQTemplateError,
    RemoteConnectError,
    SendConnectError,
    SendError,
    SendTimeoutError,
)
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_SHORTEST_TRY_S = 0.05  # in less time, a broker could store the message and answer too late
_NOT_STORED = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY})
"""Responses of a broker that is overloaded, starts or stops. It has not stored the message."""


@dataclass(slots=True)
class _Failure:
    """One reason, and the tries in a row that failed for it; times in milliseconds since the start of the send."""

    reason: str
    first: int
    last: int
    first_ms: int
    last_ms: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"({self.first}) after {format_ms(self.first_ms)}: {self.reason}"
        return (
            f"({self.first}-{self.last}) after {format_ms(self.first_ms)} to {format_ms(self.last_ms)}: {self.reason}"
        )


@dataclass(slots=True, eq=False)
class Tries:
    """The failed tries of one send.

    - A try that certainly stored nothing is repeated until the timeout: the topic has no route yet, the broker could
      not be reached, or it answered that it is busy, starts or stops. The pauses grow, so that a broker that starts is
      not flooded.
    - All other tries count. There are as many of them as RocketMQ's own client makes; a message for one queue has one.

    Args:
        request: What is sent; its text begins the error.
        retries: Number of tries that count, after the first one.
        may_repeat: False for a setting of no retries: then the first failure is the last one.
    """

    request: object
    retries: int
    may_repeat: bool
    timeout_ms: int
    deadline: float
    _number: int = 0
    _counted: int = 0
    _failures: list[_Failure] = field(default_factory=list)
    _has_timed_out: bool = False

    def pause_s(self, address: str, failure: BrokerError | RemotingCommand) -> float | None:
        """Add a failed try; return the pause before the next one, or None if it was the last one."""
        self._add(address, failure)
        if not _stored_nothing(failure):
            self._counted += 1
        left_s = self.deadline - time.monotonic() - min(_SHORTEST_TRY_S, self.timeout_ms / 10_000)
        if not self.may_repeat or self._counted > self.retries or left_s <= 0:
            return None
        pause_s = min(_FIRST_PAUSE_S * (1 << min(self._number - 1, 10)), _LONGEST_PAUSE_S)
        return min(pause_s * random.uniform(0.5, 1), left_s)  # at random times, since many producers lose one broker

    def _add(self, address: str, failure: BrokerError | RemotingCommand) -> None:
        self._number += 1
        self._has_timed_out |= isinstance(failure, TimeoutError)
        reason = str(failure) if isinstance(failure, BrokerError) else refusal_text(failure, address)
        now_ms = self.timeout_ms - round((self.deadline - time.monotonic()) * 1_000)
        if self._failures and self._failures[-1].reason == reason:
            self._failures[-1].last, self._failures[-1].last_ms = self._number, now_ms
        else:
            self._failures.append(_Failure(reason, self._number, self._number, now_ms, now_ms))

    def queue_is_away(self, queue: MessageQueue | None) -> SendError:
        """Return the error for a queue that left the route while the send was tried; these tries stored nothing."""
        self._add(
            "",
            RemoteConnectError(
                f"{queue} is not in the route of its topic any more, since its broker has stopped; send again to "
                "another queue, or when the broker is back"
            ),
        )
        error = SendError.during(str(self.request), self._text())
        error.tries, error.queue_is_away = tuple(map(str, self._failures)), True
        return error

    def _text(self) -> str:
        times = "once" if self._number == 1 else f"{self._number} times"
        return f"tried {times} within {format_ms(self.timeout_ms)}: {'; '.join(map(str, self._failures))}"

    def error(self, address: str, failure: BrokerError | RemotingCommand) -> MQTemplateError:
        """Return the error of the send after its last try, *failure*."""
        if isinstance(failure, RemotingCommand):
            has_timer = isinstance(self.request, SendRequest) and self.request.has_timer
            refused = send_error(failure, str(self.request), address, has_timer=has_timer)
            if self._number == 1:
                return refused
            kind = type(refused)
        else:
            kind = SendTimeoutError if self._has_timed_out else kind_of_send_error(failure)
        error = kind.during(str(self.request), self._text())
        if isinstance(error, SendConnectError):
            error.was_sent = self._counted > 0
        if isinstance(error, SendError):
            error.tries = tuple(map(str, self._failures))
        return error


def kind_of_send_error(failure: BrokerError) -> type[SendError]:
    """Return the class of the error of a send that ended with a failed connection or a timeout."""
    return SendConnectError if isinstance(failure, RemoteConnectError) else SendError


def _stored_nothing(failure: BrokerError | RemotingCommand) -> bool:
    """Return True if the broker has certainly not stored the message."""
    if isinstance(failure, RemotingCommand):
        return failure.code in _NOT_STORED
    if isinstance(failure, MissingTopicError | BrokerBusyError):
        return True
    return isinstance(failure, RemoteConnectError) and not failure.was_sent
