"""The listener that replies with prices, and the list that it reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from mqtemplate import message_listener, service

FILE = Path(__file__).with_name("prices.json")


@service
class PriceList:
    """Prices in cents. A real one would open a database pool in ``on_start``, on the same event loop."""

    def __init__(self) -> None:
        self._prices: dict[str, int] = {}

    async def on_start(self) -> None:
        """Read the file; the application awaits this before it starts the listeners."""
        self._prices = json.loads(await asyncio.to_thread(FILE.read_text, "utf-8"))

    async def find(self, article: str) -> int:
        """Return the price of an article."""
        return self._prices[article]


@message_listener(topic="prices", consumer_group="pricing", not_retry_for=(KeyError,))
class PriceListener:
    """Listener for requests: its result is the reply. No retry helps an article that has no price."""

    def __init__(self, prices: PriceList) -> None:
        self._prices = prices

    async def on_message(self, article: str) -> int:
        """Return the price of an article."""
        return await self._prices.find(article)
