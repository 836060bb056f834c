"""The program: three customers order at once, and are reminded to pay two seconds later, all on one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mqtemplate import MQApplication, RocketMQTemplate

from .order_listener import REMINDERS, OrderListener, Receipt
from .price_listener import PriceList, PriceListener

HERE = Path(__file__).parent
COMPONENTS = (PriceList, PriceListener, OrderListener)
ARTICLES = ("tea", "coffee", "cocoa")
MAX_WAIT_S = 30


def main() -> int:
    """Run the example.

    Returns:
        The exit code: 0 if every reminder arrived, 130 after Ctrl-C.
    """
    reminded = MQApplication(*COMPONENTS, config_folder=HERE).run(order_and_wait)
    if reminded is None:
        print("Stopped before the reminders were due. They are stored, and will be delivered after the next start.")
        return 130
    return 0


async def order_and_wait(template: RocketMQTemplate) -> list[str]:
    """Order all articles at once and wait for the reminders. The application injects the template.

    Returns:
        The texts of the reminders.
    """
    orders = (template.async_send_and_receive("orders", article, Receipt, timeout="10s") for article in ARTICLES)
    for receipt in await asyncio.gather(*orders):
        print(f"Ordered {receipt.article} for {receipt.cents} cents.")
    async with asyncio.timeout(MAX_WAIT_S):
        return await take_reminders(template, len(ARTICLES))


async def take_reminders(template: RocketMQTemplate, count: int) -> list[str]:
    """Return the next *count* reminders."""
    texts: list[str] = []
    async with template.subscribe(REMINDERS, str, consumer_group="customers") as reminders:
        async for text in reminders:
            print(f"Reminded: {text}")
            texts.append(text)
            if len(texts) == count:
                break
    return texts
