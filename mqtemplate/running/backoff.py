"""Growing pauses before a process is started again."""

from __future__ import annotations

FIRST_S = 0.5
LONGEST_S = 30.0
HEALTHY_S = 60.0


class RestartBackoff:
    """Pause before each restart of one worker: 0.5 s, 1 s, 2 s, … 30 s.

    After a worker that was ready for a minute the pause is 0.5 s again. Times are in seconds of any clock that does not
    go back.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Note that the worker is ready."""
        self._ready_at = now

    def ended(self, now: float) -> float:
        """Note that the worker has ended. Return the pause before its restart."""
        if self._ready_at is not None and now - self._ready_at >= HEALTHY_S:
            self._failures = 0
        self._ready_at = None
        pause = min(LONGEST_S, FIRST_S * (1 << min(self._failures, 10)))
        self._failures += 1
        return pause

    def reset(self) -> None:
        """Forget the failures: the code has changed."""
        self._failures = 0
