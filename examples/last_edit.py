"""A reminder fifteen minutes after the last edit of a cart, at most two hours after the first; none once it is paid.

``mqtemplate run examples.last_edit:app``
"""

from __future__ import annotations

from mqtemplate import Clock, MQApplication, RocketMQTemplate, Send, message_listener, service


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


def create_app(clock: Clock | None = None) -> MQApplication:
    """Return the application, with a broker in memory."""
    return MQApplication(mail, Carts, settings={"rocketmq.name-server": "embedded:memory"}, clock=clock)


app = create_app()
