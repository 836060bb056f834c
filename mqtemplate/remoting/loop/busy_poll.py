"""Waiting for sockets without sleeping, while their events follow each other closely. Linux: ``net.core.busy_poll``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from selectors import BaseSelector, SelectorKey

_Ready = list[tuple[SelectorKey, int]]

_TRIAL = 32
"""Waits that poll before their number of events is judged. A client that was asleep takes a few to become faster."""
_PAUSE = 512
"""Waits without polling after a trial that showed that it does not pay: polls in vain are rare then."""
_MOST_REQUESTS = 2
"""With more requests for each wait, polling ends waits early: fewer requests are read together, so each costs more."""
_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)  # Windows has none


class BusyPoll:
    """Wait of a selector that polls for some time before it sleeps.

    To put a thread to sleep and to wake it takes longer than to process a small request, so a client that sends one
    request after the other gets its responses sooner, for more processor time. Polling pauses where it finds few
    events, and where many clients send at the same time: their requests arrive together if the thread sleeps.

    Args:
        longest_s: Time to poll; 0 to sleep always.
        requests: Returns the number of requests so far.
    """

    def __init__(self, selector: BaseSelector, longest_s: float, requests: Callable[[], int]) -> None:
        self._select = selector.select
        self._longest_s = longest_s
        self._requests = requests
        self._requests_before = 0  # at the start of the trial
        self._polls = self._found = 0
        self._pause: float = 0 if longest_s else float("inf")  # waits

    def wait(self, timeout_s: float | None) -> _Ready:
        """Wait for events and return them; none after *timeout_s*, or up to ``longest_s`` later."""
        if timeout_s == 0:
            return self._select(0)
        if self._pause:
            self._pause -= 1
            return self._select(timeout_s)
        if not self._polls:
            self._requests_before = self._requests()
        ready = self._poll()
        self._polls += 1
        self._found += bool(ready)
        if self._polls == _TRIAL:
            self._end_trial()
        return ready or self._select(timeout_s)

    def _end_trial(self) -> None:
        requests = self._requests() - self._requests_before
        pays = 2 * self._found >= _TRIAL and requests <= _MOST_REQUESTS * _TRIAL
        self._pause = 0 if pays else _PAUSE
        self._polls = self._found = 0

    def _poll(self) -> _Ready:
        end_s = time.monotonic() + self._longest_s
        while not (ready := self._select(0)) and time.monotonic() < end_s:
            _yield()  # the scheduler may have chosen this processor for the thread of a client that the response woke
        return ready
