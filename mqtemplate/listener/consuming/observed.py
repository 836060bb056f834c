"""Invocation of a handler on a virtual clock, which reports each call to observers: the test kit is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mqtemplate.listener.consuming.invocation import Invocation
from mqtemplate.listener.failures.failure import Failure
from mqtemplate.message import MessageExt

Observer: TypeAlias = Callable[[Sequence[MessageExt], Sequence[Failure]], object]
"""Function that gets the messages of one call, and those of them that failed."""


class ObservedInvocation(Invocation):
    """Invocation that reports each call after it.

    Args:
        observers: Observers; the list may grow while the container runs.
    """

    def __init__(self, *arguments: Any, observers: Sequence[Observer]) -> None:
        super().__init__(*arguments)
        self._observers = observers

    def handle_one(self, message: MessageExt) -> Failure | None:
        failure = super().handle_one(message)
        self._report((message,), () if failure is None else (failure,))
        return failure

    def _handle_batch(self, messages: Sequence[MessageExt]) -> list[Failure]:
        failures = super()._handle_batch(messages)
        self._report(messages, failures)
        return failures

    def _report(self, messages: Sequence[MessageExt], failures: Sequence[Failure]) -> None:
        for observe in self._observers:
            observe(messages, failures)
