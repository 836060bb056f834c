"""Waiting for sockets without sleeping, while their events follow each other closely. Linux: ``net.core.busy_poll``."""

from __future__ import annotations

import time
from selectors import BaseSelector, SelectorKey

_Ready = list[tuple[SelectorKey, int]]

_TRIAL = 32
"""Waits that poll before their number of events is judged. A client that was asleep takes a few to become faster."""
_PAUSE = 512
"""Waits without polling after a trial in which less than half of them found an event: polls in vain are rare then."""


class BusyPoll:
    """Wait of a selector that polls for some time before it sleeps.

    To put a thread to sleep and to wake it takes longer than to process a small request, so a client that sends one
    request after the other gets its responses sooner, for more processor time. Where polling finds few events, it
    pauses.

    Args:
        longest_s: Time to poll; 0 to sleep always.
    """

    def __init__(self, selector: BaseSelector, longest_s: float) -> None:
        self._select = selector.select
        self._longest_s = longest_s
        self._polls = self._found = 0
        self._pause: float = 0 if longest_s else float("inf")  # waits

    def wait(self, timeout_s: float | None) -> _Ready:
        """Wait for events and return them; none after *timeout_s*, or up to ``longest_s`` later."""
        if timeout_s == 0:
            return self._select(0)
        if self._pause:
            self._pause -= 1
            return self._select(timeout_s)
        ready = self._poll()
        self._polls += 1
        self._found += bool(ready)
        if self._polls == _TRIAL:
            self._pause = _PAUSE if 2 * self._found < _TRIAL else 0
            self._polls = self._found = 0
        return ready or self._select(timeout_s)

    def _poll(self) -> _Ready:
        end_s = time.monotonic() + self._longest_s
        while not (ready := self._select(0)) and time.monotonic() < end_s:
            pass
        return ready
