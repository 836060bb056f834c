"""An application of ours at a server with access control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peer.rocketmq import free_port
from mqtemplate import MQApplication
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import BrokerError, SendError
from mqtemplate.message import HostAddress
from mqtemplate.results import SendStatus
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from tests.server.tool import ANY_PORT

SECRET = "a secret that nobody sees"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    address = HostAddress("127.0.0.1", free_port())
    account = Account(access_key="shop-owner", secret_key=SECRET, topic_perms={"orders": Right.PUB})
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    acl = AclSettings(accounts=(account,))
    with LocalCluster(engine, BrokerServerSettings(listen=address), ANY_PORT, acl=acl) as cluster:
        yield cluster


def application(cluster: LocalCluster, folder: Path, secret: str) -> MQApplication:
    settings = {
        "rocketmq.name-server": str(cluster.name_server_address),
        "rocketmq.producer.group": "shop",
        "rocketmq.producer.access-key": "shop-owner",
        "rocketmq.producer.secret-key": secret,
    }
    return MQApplication(config_folder=folder, settings=settings)


def test_it_comes_in_with_its_key_and_does_what_it_may(cluster: LocalCluster, tmp_path: Path) -> None:
    with application(cluster, tmp_path, SECRET) as app:
        result = app.template.sync_send("orders", "hello")
        with pytest.raises(SendError, match="access key 'shop-owner' has no right PUB on topic 'invoices'"):
            app.template.sync_send("invoices", "hello")

    assert result.send_status is SendStatus.SEND_OK


def test_with_another_secret_it_does_not_start(cluster: LocalCluster, tmp_path: Path) -> None:
    app = application(cluster, tmp_path, "another secret")

    with pytest.raises(BrokerError, match="access key 'shop-owner' is not known here, or its secret key is another"):
        app.start()
