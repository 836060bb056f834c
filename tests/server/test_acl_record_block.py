"""Access control of the request for a block of records: the right to read its topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import GetRecordBlockRequestHeader, GetRecordBlockResponseHeader
from mqtemplate.remoting.settings import Credentials
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from tests.server.tool import ANY_PORT, Tool, make_engine

SECRET = "a secret that is never shown"
ACCOUNTS = (
    Account(access_key="spark-job", secret_key=SECRET, topic_perms={"orders": Right.SUB, "salaries": Right.PUB}),
)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(make_engine(VirtualClock()), settings, acl=AclSettings(accounts=ACCOUNTS)) as cluster:
        for topic in ("orders", "salaries"):
            cluster.engine.create_topic(topic, 1)
            cluster.engine.sends.send(Message(topic, b"one"))
            cluster.engine.sends.send(Message(topic, b"two"))
        yield cluster


@pytest.mark.parametrize(
    ("topic", "code"), [("orders", ResponseCode.SUCCESS), ("salaries", ResponseCode.NO_PERMISSION)]
)
def test_a_block_needs_the_right_to_read_its_topic(cluster: LocalCluster, topic: str, code: int) -> None:
    """The right to send is not enough."""
    header = GetRecordBlockRequestHeader(topic=topic, queue_id=0, queue_offset=0, end_offset=9)
    with Tool(cluster.address, Credentials(access_key="spark-job", secret_key=SECRET)) as tool:
        response = tool.request(RequestCode.GET_RECORD_BLOCK, header)

    assert response.code == code
    assert (b"one" in response.body) == (code == ResponseCode.SUCCESS)


def test_a_block_has_the_records_of_its_queue_only(cluster: LocalCluster) -> None:
    """The log between them has records of other topics."""
    header = GetRecordBlockRequestHeader(topic="orders", queue_id=0, queue_offset=0, end_offset=9)
    with Tool(cluster.address, Credentials(access_key="spark-job", secret_key=SECRET)) as tool:
        response = tool.request(RequestCode.GET_RECORD_BLOCK, header)
        small = tool.request(
            RequestCode.GET_RECORD_BLOCK,
            GetRecordBlockRequestHeader(topic="orders", queue_id=0, queue_offset=0, end_offset=9, max_bytes=1),
        )

    assert b"salaries" not in response.body
    assert response.header(GetRecordBlockResponseHeader).next_offset == 2
    assert small.header(GetRecordBlockResponseHeader).next_offset == 1


@pytest.mark.parametrize(
    ("queue_id", "offset", "code"), [(7, 0, ResponseCode.INVALID_PARAMETER), (0, 5, ResponseCode.PULL_OFFSET_MOVED)]
)
def test_a_block_outside_of_a_queue_is_refused(cluster: LocalCluster, queue_id: int, offset: int, code: int) -> None:
    header = GetRecordBlockRequestHeader(topic="orders", queue_id=queue_id, queue_offset=offset, end_offset=9)
    with Tool(cluster.address, Credentials(access_key="spark-job", secret_key=SECRET)) as tool:
        assert tool.request(RequestCode.GET_RECORD_BLOCK, header).code == code
