"""A real RocketMQ broker that registers at our name server, and a client that finds both brokers there."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench.peer.jvm import why_not
from bench.peer.rocketmq import JavaClient, NameServer, RocketMQ, free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool

pytestmark = pytest.mark.conformance


def test_rocketmqs_broker_registers_and_java_sends_to_it(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    address = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    with LocalCluster(engine, BrokerServerSettings(listen=address), ANY_PORT) as cluster:
        names = cast(NameServer, SimpleNamespace(address=str(cluster.name_server_address), version="5.5.0"))
        with RocketMQ(tmp_path / "theirs", names, {"brokerName": "broker-b"}), JavaClient(names) as java:
            java.connect()
            door = address_of(cluster, "broker-b")
            java.mqadmin("updateTopic", "-n", names.address, "-b", door, "-t", "on-theirs", "-r", "2", "-w", "2")
            clusters = java.mqadmin("clusterList", "-n", names.address)
            (sent,) = java.send({"topic": "on-theirs", "body": b"hello"})
            (found,) = java.read("on-theirs", 1)

    assert "broker-a" in clusters
    assert "broker-b" in clusters
    assert sent["status"] == "SEND_OK"
    assert found.body == b"hello"


def address_of(cluster: LocalCluster, name: str) -> str:
    """Where a broker is, once it has registered: a moment after it serves."""
    deadline = time.monotonic() + 60
    with Tool(cluster.name_server_address) as tool:
        while time.monotonic() < deadline:
            info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
            if name in info.broker_addr_table:
                return info.broker_addr_table[name].broker_addrs[0]
    raise AssertionError(f"{name} did not register")
