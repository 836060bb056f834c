"""The listener for orders: it awaits the price from another listener, and sends a delayed reminder."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate import RocketMQTemplate, message_listener

REMINDERS = "reminders"
DELAY = "2s"


@dataclass(frozen=True)
class Receipt:
    """Reply to an order."""

    article: str
    cents: int


@message_listener(topic="orders", consumer_group="ordering", retry=["1s", "5s"])
class OrderListener:
    """Listener for orders. While one awaits its price, the others go on. An order without a price is tried again."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._template = template

    async def on_message(self, article: str) -> Receipt:
        """Find the price, send the reminder, and reply with the receipt."""
        cents = await self._template.async_send_and_receive("prices", article, int)
        await self._template.async_send(REMINDERS, f"please pay {cents} cents for your {article}", delay=DELAY)
        return Receipt(article, cents)
