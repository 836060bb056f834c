"""Log lines of transactions: their number does not follow the number of half messages."""

from __future__ import annotations

from collections import Counter

from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.results import TransactionState
from mqtemplate.testing import Harness

HALVES = 300
SETTINGS = EmbeddedSettings(transaction_check_max=3, transaction_check_interval_ms=10_000)


def test_a_silent_producer_writes_a_few_lines_and_their_number() -> None:
    """20,000 half messages and a producer that does not answer wrote 120,191 lines."""
    broker = EmbeddedBroker(None, SETTINGS, VirtualClock())
    broker.start()
    broker.transactions.check_transactions("shop", lambda message: TransactionState.UNKNOWN)
    for number in range(HALVES):
        broker.sends.send_half(Message("orders", b"%d" % number), "shop")

    with capture_logs() as events:
        Harness(broker).advance("200s")
    broker.close()

    written = [event for event in events if event["event"].startswith("transaction.")]
    suppressed = Counter[str]()
    for event in written:
        suppressed[event["event"]] += event.get("suppressed", 0)
    lines = Counter(event["event"] for event in written)
    assert broker.metrics.snapshot()["transaction.discarded"] == HALVES
    assert len(written) < 150
    assert lines["transaction.discarded"] == 11
    assert lines["transaction.discarded"] - 1 + suppressed["transaction.discarded"] == HALVES
