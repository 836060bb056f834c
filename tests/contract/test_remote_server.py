"""The broker contract on the remote broker with our own server, which runs in this process with a store on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peer.rocketmq import free_port
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing.contract import BrokerContract, BrokerUnderTest


def free_address() -> HostAddress:
    return HostAddress("127.0.0.1", free_port())


class OurServer:
    """A server with a store directory, and a client; both can be restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = free_address()
        self.start()

    def start(self) -> None:
        engine = EmbeddedBroker(
            self._folder / "store",
            EmbeddedSettings(
                listen_host=self.address,
                mapped_file_size_commit_log=16 * 1024 * 1024,
                mapped_file_size_consume_queue=20_000,
                transaction_timeout_ms=1_000,
                transaction_check_interval_ms=1_000,
            ),
        )
        self._cluster = LocalCluster(engine, BrokerServerSettings(listen=self.address))
        self._cluster.start()
        settings = RemoteSettings(name_servers=(str(self.address),), offset_path=self._folder / "offsets")
        self.client = RemoteBroker(settings)
        self.client.start()

    def stop(self) -> None:
        self.client.close()
        self._cluster.stop()

    def restart(self) -> Broker:
        self.stop()
        self.start()
        return self.client


class TestOurServer(BrokerContract):
    @pytest.fixture
    def under_test(self, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        server = OurServer(tmp_path)
        yield BrokerUnderTest.on_real_clock(server.client, restart=server.restart, checks_within_ms=5_000)
        server.stop()
