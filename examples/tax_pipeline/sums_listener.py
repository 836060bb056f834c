"""A listener for the sums that Spark writes to a topic."""

from __future__ import annotations

from threading import Condition

from pydantic import BaseModel

from mqtemplate import message_listener, service


class SumOfBatch(BaseModel, frozen=True):
    """Sum of one region and period in one batch: a row of Spark, as JSON."""

    region: str
    period: str
    payments: int
    amount_cents: int


@service
class ReceivedSums:
    """Total of the sums that arrived. The program waits for it."""

    def __init__(self) -> None:
        self.payments = 0
        self.amount_cents = 0
        self._changed = Condition()

    def add(self, row: SumOfBatch) -> None:
        """Add the sum of one region and period in one batch."""
        with self._changed:
            self.payments += row.payments
            self.amount_cents += row.amount_cents
            self._changed.notify_all()

    def wait_for(self, payments: int, timeout_s: float) -> bool:
        """Wait until the sums of so many payments arrived; return False if they do not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.payments >= payments, timeout_s)


@message_listener(topic="tax-sums", consumer_group="tax-sums-group")
class SumsListener:
    """Listener for the messages that Spark writes."""

    def __init__(self, received: ReceivedSums) -> None:
        self._received = received

    def on_message(self, row: SumOfBatch) -> None:
        """Add the sum of a batch."""
        self._received.add(row)
