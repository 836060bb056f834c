"""Access control of sequenced sends: the right to send to each topic in the body."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import SendSequencedRequestHeader
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.remoting.settings import Credentials
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.testing import messages_in
from tests.server.tool import ANY_PORT, Tool, make_engine

SECRET = "a secret that is never shown"
ACCOUNT = Account(access_key="shop-owner", secret_key=SECRET, topic_perms={"orders": Right.PUB, "invoices": Right.SUB})


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(make_engine(VirtualClock()), settings, acl=AclSettings(accounts=(ACCOUNT,))) as cluster:
        for topic in ("orders", "invoices"):
            cluster.engine.create_topic(topic, 1)
        yield cluster


def send(cluster: LocalCluster, *topics: str) -> tuple[int, str | None]:
    """Return the code and the remark of the response to a sequenced send with one message for each topic."""
    header = SendSequencedRequestHeader(
        producer_group="g", app_id="query", version=0, partition=0, first=0, born_timestamp=0
    )
    body = encode_queue_batches([(Message(topic, b"x"), 0) for topic in topics], {topic: topic for topic in topics})
    with Tool(cluster.address, Credentials(access_key=ACCOUNT.access_key, secret_key=SECRET)) as tool:
        response = tool.request(RequestCode.SEND_SEQUENCED_MESSAGES, header, body)
    return response.code, response.remark


def test_each_topic_of_a_sequenced_send_needs_the_right_to_send(cluster: LocalCluster) -> None:
    code, remark = send(cluster, "orders", "invoices")

    assert code == ResponseCode.NO_PERMISSION
    assert "has no right PUB on topic 'invoices' (SEND_SEQUENCED_MESSAGES)" in str(remark)
    assert messages_in(cluster.engine, "orders") == []
    assert send(cluster, "orders") == (ResponseCode.SUCCESS, None)


def test_the_retry_topic_of_a_group_needs_the_right_to_the_group(cluster: LocalCluster) -> None:
    code, remark = send(cluster, "%RETRY%billing")

    assert code == ResponseCode.NO_PERMISSION
    assert "has no right SUB on group 'billing'" in str(remark)
