"""Messages that the listeners of a test have handled, and those that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.listener.failures.failure import DeadLetter, Failure, RetryLater
from mqtemplate.message import MessageExt
from mqtemplate.user_code import error_text

_REQUESTS = (RetryLater, DeadLetter, PauseListener)
"""Exceptions by which a handler requests something: no failure of the test."""


class HandlerFailedError(AssertionError):
    """Handlers raised during a test that does not expect it."""


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """One call of a handler that raised.

    Attributes:
        listener: Name of the listener.
        messages: Messages of the call that failed.
        error: The exception.
    """

    listener: str
    messages: Sequence[MessageExt]
    error: BaseException

    def __str__(self) -> str:
        first = self.messages[0]
        return f"{self.listener}: {error_text(self.error)} (topic {first.topic}, msg_id {first.msg_id})"


@dataclass(slots=True)
class HandledMessages:
    """Record of one listener.

    Attributes:
        received: Messages that its handler took without an exception, oldest first.
        failures: Calls that raised, oldest first; shared by all listeners of a harness.
    """

    container: ListenerContainer
    failures: list[HandlerFailure]
    received: list[MessageExt] = field(default_factory=list)

    def note(self, messages: Sequence[MessageExt], failed: Sequence[Failure]) -> None:
        """Note one call; an observer of the container."""
        lost = {id(message) for failure in failed for message in failure.messages}
        self.received += [message for message in messages if id(message) not in lost]
        self.failures += [
            HandlerFailure(self.container.endpoint.id, failure.messages, failure.error)
            for failure in failed
            if failure.error is not None and not isinstance(failure.error, _REQUESTS)
        ]

    def is_of(self, listener: object) -> bool:
        """Return True for the name, the function, the class or the object of this listener."""
        endpoint = self.container.endpoint
        return listener == endpoint.id or any(
            _is_of(handler, listener) for plan in endpoint.plan.plans() for handler in _wrapped(plan.handler)
        )


def _wrapped(handler: object) -> Iterator[object]:
    """Yield a handler, and the functions inside of it: a starter may have put a context around the handler."""
    inner: object | None = handler
    while inner is not None:
        yield inner
        inner = getattr(inner, "__wrapped__", None)


def _is_of(handler: object, listener: object) -> bool:
    owner = getattr(handler, "__self__", None)
    return listener == handler or (owner is not None and (listener is owner or listener is type(owner)))
