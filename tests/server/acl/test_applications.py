"""An application of mqtemplate as the client of a server with access control."""

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

SECRET = "a secret that is never shown"


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


def test_an_application_can_use_the_rights_of_its_account(cluster: LocalCluster, tmp_path: Path) -> None:
    with application(cluster, tmp_path, SECRET) as app:
        result = app.template.sync_send("orders", "hello")
        with pytest.raises(SendError, match="access key 'shop-owner' has no right PUB on topic 'invoices'"):
            app.template.sync_send("invoices", "hello")

    assert result.send_status is SendStatus.SEND_OK


def test_an_application_with_a_wrong_secret_key_does_not_start(cluster: LocalCluster, tmp_path: Path) -> None:
    app = application(cluster, tmp_path, "another secret")

    with pytest.raises(BrokerError, match="access key 'shop-owner' is unknown, or its secret key is wrong"):
        app.start()
