"""What this client knows to be stored, since it sent or read it: its own questions must not come back without it.

A broker answers a send when the message is in its log; it enters queue and index a moment later, one after the other.
"""

from __future__ import annotations

from mqtemplate.clock import Clock
from mqtemplate.message import MessageQueue
from mqtemplate.results import SendResult

_FRESH_MS = 5_000
_OFFSET_DIGITS = 16


class SentOffsets:
    """How far this client has sent and seen, by queue and by broker; forgotten after some seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[MessageQueue, tuple[int, int]] = {}
        self._physical: dict[str, tuple[int, int]] = {}

    def note(self, result: SendResult, count: int, *, in_queue: bool) -> None:
        """Note what was sent.

        Args:
            in_queue: It is in its queue, and does not wait for a time or the end of a transaction.
        """
        queue, now_ms = result.message_queue, self._clock.now_ms()
        if in_queue:
            self._ends[queue] = (result.queue_offset + count, now_ms)
        digits = result.offset_msg_id[-_OFFSET_DIGITS:]
        if len(digits) == _OFFSET_DIGITS:
            self.see(queue.broker_name, int(digits, 16))

    def see(self, broker_name: str, physical_offset: int) -> None:
        """Note that a message at this place of a broker's log is known here."""
        known = self._physical.get(broker_name)
        if known is None or known[0] < physical_offset:
            self._physical[broker_name] = (physical_offset, self._clock.now_ms())

    def end_of(self, queue: MessageQueue) -> int:
        """One past the last message that was sent there; 0 if it was not lately."""
        return self._fresh(self._ends.get(queue))

    def physical_of(self, broker_name: str) -> int:
        """The physical offset of the last message of that broker that is known here; 0 if it was not lately."""
        return self._fresh(self._physical.get(broker_name))

    def age_of(self, broker_name: str) -> int:
        """How long ago that last message came to be known here, in ms; very long if there is none."""
        known = self._physical.get(broker_name)
        return _FRESH_MS if known is None else self._clock.now_ms() - known[1]

    def _fresh(self, mark: tuple[int, int] | None) -> int:
        return mark[0] if mark is not None and self._clock.now_ms() - mark[1] < _FRESH_MS else 0
