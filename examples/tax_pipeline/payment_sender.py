"""Sends each payment as a delayed message: by delay level, relative delay, or deliver time."""

from __future__ import annotations

import random
from concurrent.futures import Future
from datetime import timedelta

from mqtemplate import Clock, RocketMQTemplate, SendResult, service

from .tax_data import TaxPayment

DESTINATION = "tax-data:2021S4"
LEVEL_5 = 5
LONGEST_MS = 10_000


@service
class PaymentSender:
    """Sender of payments. It is asynchronous, so that the broker can write many of them to disk together."""

    def __init__(self, template: RocketMQTemplate, clock: Clock) -> None:
        self._template = template
        self._clock = clock
        self._random = random.Random(4)

    def send(self, payments: list[TaxPayment]) -> list[Future[SendResult]]:
        """Send all payments and return the futures of the results."""
        return [self._send_one(number, payment) for number, payment in enumerate(payments)]

    def send_at_level_5(self, payment: TaxPayment) -> SendResult:
        """Send one payment with delay level 5, as in RocketMQ's own example."""
        return self._template.sync_send(DESTINATION, payment, delay_level=LEVEL_5, keys=payment.id)

    def _send_one(self, number: int, payment: TaxPayment) -> Future[SendResult]:
        send, keys = self._template.async_send, payment.id
        wait_ms = self._random.randint(100, LONGEST_MS)
        match number % 3:
            case 0:
                return send(DESTINATION, payment, delay_level=self._random.randint(1, 6), keys=keys)
            case 1:
                return send(DESTINATION, payment, delay=timedelta(milliseconds=wait_ms), keys=keys)
            case _:
                return send(DESTINATION, payment, deliver_at=self._clock.now_ms() + wait_ms, keys=keys)
