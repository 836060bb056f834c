"""A reminder fifteen minutes after the last edit of a cart, at most two hours after the first; none once it is paid.

``python -m examples.last_edit`` shows an evening of three customers at once, on a virtual clock.
"""

from __future__ import annotations

from mqtemplate import MQApplication, RocketMQTemplate, Send, VirtualClock, message_listener, service
from mqtemplate.testing import Harness


@service
class Carts:
    """Carts, and their reminders: one is pending for each cart that waits."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._template = template

    def edited(self, cart: str, books: int) -> None:
        """Remind the customer fifteen minutes from now, of the cart as it is now."""
        self._template.sync_send(
            "reminders:cart", f"{cart}: {books} books wait", delay="15m", pending_key=cart, keys=cart
        )

    def viewed(self, cart: str) -> None:
        """Let the reminder wait longer, as long as two hours after it was sent first. Its text stays."""
        self._template.sync_send(
            "reminders:cart",
            f"{cart} waits",
            delay="15m",
            pending_key=cart,
            on_pending="postpone",
            no_later_than="2h",
            keys=cart,
        )

    def paid(self, cart: str) -> bool:
        """Cancel the reminder and thank the customer, both or nothing; return False if there was no reminder."""
        thanks = Send("reminders:thanks", f"{cart}: thank you", delay="1h")
        return bool(self._template.cancel(key=cart, topic="reminders", then=[thanks]).count)


@message_listener("reminders", "mailer")
def mail(text: str) -> None:
    """Write the mail."""
    print("mail:", text, flush=True)


def main() -> None:
    """Show what happens to three carts."""
    settings = {"rocketmq.name-server": "embedded:memory"}
    with MQApplication(mail, Carts, settings=settings, clock=VirtualClock()) as app:
        carts, harness = app.get(Carts), Harness(app)
        for books in (1, 2, 3):
            carts.edited("cart-ada", books)
            harness.advance("10m")
        print("30 minutes, no mail yet", flush=True)
        harness.advance("5m")

        carts.edited("cart-bob", 1)
        for _ in range(11):
            harness.advance("10m")
            carts.viewed("cart-bob")
        harness.advance("11m")

        carts.edited("cart-cleo", 5)
        print("paid in time:", carts.paid("cart-cleo"), flush=True)
        harness.advance("1h")


if __name__ == "__main__":
    main()
