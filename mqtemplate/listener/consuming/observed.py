"""Handler of a listener on a virtual clock, which reports each call to observers: the test kit is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from mqtemplate.listener.consuming.consume_service import Handling
from mqtemplate.listener.failures.failure import Failure
from mqtemplate.message import MessageExt

Observer: TypeAlias = Callable[[Sequence[MessageExt], Sequence[Failure]], object]
"""Function that gets the messages of one call, and those of them that failed."""


class ObservedHandling:
    """Handling that reports each call after it.

    Args:
        observers: Observers; the list may grow while the container runs.
    """

    def __init__(self, handling: Handling, observers: Sequence[Observer]) -> None:
        self._handling = handling
        self._observers = observers

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages."""
        failures = self._handling.handle(messages)
        self._report(messages, failures)
        return failures

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        failure = self._handling.handle_one(message)
        self._report((message,), () if failure is None else (failure,))
        return failure

    def _report(self, messages: Sequence[MessageExt], failures: Sequence[Failure]) -> None:
        for observe in self._observers:
            observe(messages, failures)
