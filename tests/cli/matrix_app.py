"""Components of the application whose listeners and schedules the commands change."""

from __future__ import annotations

from mqtemplate import message_listener
from mqtemplate.scheduling import scheduled


@message_listener(topic="invoices", consumer_group="accounting", id="book")
def book(invoice: str) -> None: ...


@scheduled(every="1h", name="report")
def report() -> None: ...
