"""A listener for single messages, which reports one payment."""

from __future__ import annotations

from mqtemplate import Clock, MessageExt, message_listener

from .tax_data import TaxPayment

WATCHED_ID = "4466"


@message_listener(topic="tax-data", consumer_group="one-payment-group", selector_expression="2021S4")
class OnePaymentListener:
    """Listener for every payment of the quarter; it prints one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_message(self, payment: TaxPayment, message: MessageExt) -> None:
        """Print the payment with the watched id."""
        if payment.id != WATCHED_ID:
            return
        due_ms = message.deliver_timestamp or message.born_timestamp
        print(
            f"Payment {payment.id} arrived: {payment.region}, {payment.period}, {payment.amount_cents / 100:,.2f}; "
            f"sent with level {message.delay_level}, {self._clock.now_ms() - due_ms} ms after it was due."
        )
