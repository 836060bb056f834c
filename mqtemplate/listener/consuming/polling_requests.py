"""Actions that other threads have the polling thread run between two fetches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from mqtemplate.errors import ListenerError


class PollingRequests:
    """Queue of actions. `submit` waits until the polling thread has run the action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._is_closed = False

    def submit(self, action: Callable[[], None], wake: Callable[[], None]) -> None:
        """Run an action in the polling thread and wait for its end.

        Args:
            wake: Function that ends the wait of the polling thread.

        Raises:
            ListenerError: The polling thread has ended.
            Exception: The error of the action.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                raise self._stopped()
            self._pending.append((action, done))
        wake()
        done.result()

    def run(self) -> None:
        """Run the actions that are pending. The polling thread calls it."""
        while self._pending:
            action, done = self._pending.popleft()
            try:
                action()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

    def close(self) -> None:
        """Refuse the pending actions and all later ones. The polling thread calls it at its end."""
        with self._lock:
            self._is_closed = True
            pending, self._pending = self._pending, deque()
        for _, done in pending:
            done.set_exception(self._stopped())

    def _stopped(self) -> ListenerError:
        return ListenerError(f"{self._name} is not running; start it first")
