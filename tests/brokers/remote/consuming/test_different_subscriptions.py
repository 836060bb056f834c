"""Members of one group with different subscriptions, in two clients of our server."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import ListenerError
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import ANYWHERE, client, join, server
from tests.waiting import eventually

PAID, SHIPPED = TagSelector("paid"), TagSelector("shipped")


def test_the_server_and_both_clients_log_different_subscriptions(tmp_path: Path) -> None:
    """In RocketMQ the last member wins, and the messages of the others are lost without a word."""
    with (
        structlog.testing.capture_logs() as logged,
        server() as cluster,
        client(cluster.address, tmp_path) as one,
        client(cluster.address, tmp_path, heartbeat_broker_interval_ms=50) as other,
    ):
        one.create_topic("orders", 2)
        second = join(other, "orders", selector=SHIPPED)
        first = join(one, "orders", selector=PAID)
        warned = eventually(lambda: _warned(logged, 2), "the second client learns it by its next heartbeat")
        first.close()
        second.close()

    assert all("orders:paid" in text and "orders:shipped" in text for text in warned)
    at_server = [event["reason"] for event in logged if event["event"] == "server.subscriptions_differ"]
    assert at_server[0] in warned  # by the member whose heartbeat came first after the other had joined
    assert "group 'billing' has members with different subscriptions" in warned[0]


def _warned(logged: list[structlog.typing.EventDict], count: int) -> list[str]:
    """Return the warnings of the clients, once there are so many."""
    warned = [event["reason"] for event in logged if event["event"] == "remote.subscriptions_differ"]
    return warned if len(warned) >= count else []


def test_a_strict_server_refuses_the_second_member(tmp_path: Path) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    settings = BrokerServerSettings(listen=ANYWHERE, strict_subscriptions=True)
    with (
        LocalCluster(engine, settings) as cluster,
        client(cluster.address, tmp_path) as one,
        client(cluster.address, tmp_path) as other,
    ):
        one.create_topic("orders", 2)
        join(one, "orders", selector=PAID)

        with pytest.raises(ListenerError, match=r"orders:shipped, .* to orders:paid.*strict-subscriptions"):
            join(other, "orders", selector=SHIPPED)
        same = join(other, "orders", selector=PAID)

        eventually(lambda: sum(queue.topic == "orders" for queue in same.assignment()) == 1, "it shares the queues")
