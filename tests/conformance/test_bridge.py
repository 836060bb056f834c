"""One application on two clusters: Apache RocketMQ and our server, joined by the example bridge."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest

from examples.bridge.app import Bridge
from mqtemplate import EmbeddedBroker, EmbeddedSettings, MessageExt, MQApplication, RocketMQTemplate, message_listener
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.conformance.servers import rocketmq_server
from tests.contract.test_remote_rocketmq import until_registered
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.thorough,
    pytest.mark.timeout(180),
    pytest.mark.feature("clusters"),
]

ANYWHERE = HostAddress("127.0.0.1", 0)


def test_messages_go_from_rocketmq_to_our_server(rocketmq: None, tmp_path: Path) -> None:
    """The clients of both clusters live side by side: each message arrives with its tag."""
    received: SimpleQueue[MessageExt] = SimpleQueue()

    @message_listener("orders", "billing", broker="shop", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(message: MessageExt) -> None:
        received.put(message)

    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with (
        rocketmq_server(tmp_path) as headquarters,
        engine,
        LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as shop,
    ):
        until_registered(headquarters.address)
        settings = {
            "rocketmq.name-server": "embedded:memory",
            "rocketmq.templates.headquarters.name-server": headquarters.address,
            "rocketmq.templates.shop.name-server": str(shop.address),
            "rocketmq.templates.shop.group": "bridge",
        }
        with MQApplication(Bridge, bill, settings=settings, environment={}) as app:
            assert app.health().is_up
            sender = app.get(RocketMQTemplate, "headquarters")
            sender.sync_send("orders", "first", keys="0")  # it creates the topic, so the bridge may join later
            for number in range(1, 6):
                sender.sync_send("orders:paid", f"order {number}", keys=str(number))

            bodies: dict[str, str | None] = {}
            while len([body for body in bodies if body != "first"]) < 5:
                message = received.get(timeout=PATIENCE_S)
                bodies[message.body.decode()] = message.tags
            assert {body: tag for body, tag in bodies.items() if body != "first"} == {
                f"order {number}": "paid" for number in range(1, 6)
            }
