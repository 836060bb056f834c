"""RocketMQ's broker registers with this project's name server, and RocketMQ's client finds both brokers there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool
from tests.waiting import eventually

pytestmark = pytest.mark.conformance


def test_rocketmqs_broker_registers_and_a_java_client_uses_it(rocketmq: None, tmp_path: Path) -> None:
    address = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    settings = BrokerServerSettings(listen=address, broker_registration_enable=True)
    with LocalCluster(engine, settings, ANY_PORT) as cluster:
        name_server = cast(NameServer, SimpleNamespace(address=str(cluster.name_server_address), version="5.5.0"))
        with RocketMQ(tmp_path / "store", name_server, {"brokerName": "broker-b"}), JavaClient(name_server) as java:
            java.connect()
            with Tool(cluster.name_server_address) as tool:
                broker = eventually(lambda: registered_address(tool, "broker-b"), "broker-b is registered")
            update = ("updateTopic", "-n", name_server.address, "-b", broker, "-t", "on-broker-b", "-r", "2", "-w", "2")
            java.mqadmin(*update)
            clusters = java.mqadmin("clusterList", "-n", name_server.address)
            (sent,) = java.send({"topic": "on-broker-b", "body": b"hello"})
            (found,) = java.read("on-broker-b", 1)

    assert "broker-a" in clusters
    assert "broker-b" in clusters
    assert sent["status"] == "SEND_OK"
    assert found.body == b"hello"


def registered_address(tool: Tool, broker_name: str) -> str | None:
    """Return the address of a broker, None if it is not registered."""
    info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    return info.broker_addr_table[broker_name].broker_addrs[0] if broker_name in info.broker_addr_table else None
