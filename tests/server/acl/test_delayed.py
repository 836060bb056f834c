"""Access control of the requests for pending messages: the rights to what a request reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.delay.recall_handle import decode_handle, encode_handle
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import (
    CancelDelayedMessageRequestHeader,
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    RescheduleDelayedMessageRequestHeader,
    ScheduleChangeData,
)
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.settings import Credentials
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from tests.server.tool import ANY_PORT, Tool, make_engine

SECRET = "a secret that is never shown"
CANCEL, RESCHEDULE = RequestCode.CANCEL_DELAYED_MESSAGE, RequestCode.RESCHEDULE_DELAYED_MESSAGE
LIST, COUNT = RequestCode.GET_PENDING_MESSAGES, RequestCode.COUNT_PENDING_MESSAGES
ACCOUNTS = (
    Account(access_key="administrator", secret_key=SECRET, admin=True),
    Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB, "invoices": Right.SUB},
        group_perms={"billing": Right.SUB},
    ),
    Account(
        access_key="all-topics",
        secret_key=SECRET,
        default_topic_perm=Right.PUB | Right.SUB,
        default_group_perm=Right.SUB,
    ),
    Account(
        access_key="all-but-orders",
        secret_key=SECRET,
        default_topic_perm=Right.PUB | Right.SUB,
        default_group_perm=Right.SUB,
        topic_perms={"orders": Right.DENY},
    ),
)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(make_engine(VirtualClock()), settings, acl=AclSettings(accounts=ACCOUNTS)) as cluster:
        for topic in ("orders", "invoices"):
            cluster.engine.create_topic(topic, 1)
        yield cluster


def handle_of_new_message(cluster: LocalCluster, topic: str) -> str:
    properties = {Property.DELAY: "18", Property.KEYS: "4466"}
    handle = cluster.engine.sends.send(Message(topic, b"x", properties)).handle
    assert handle is not None
    return handle


def refusal(cluster: LocalCluster, access_key: str, code: int, header: CommandHeader) -> str | None:
    """Return the remark of the response to a request that is refused; None for one that is carried out."""
    with Tool(cluster.address, Credentials(access_key=access_key, secret_key=SECRET)) as tool:
        response = tool.request(code, header)
    assert response.code in (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION), str(response)
    return response.remark


def by_handle(cluster: LocalCluster, *topics: str) -> CancelDelayedMessageRequestHeader:
    handle = ",".join(handle_of_new_message(cluster, topic) for topic in topics)
    return CancelDelayedMessageRequestHeader(handle=handle)


def by_key(topic: str | None) -> RescheduleDelayedMessageRequestHeader:
    return RescheduleDelayedMessageRequestHeader(key="4466", topic=topic, deliver_time=0)


def listing(topic: str | None) -> GetPendingMessagesRequestHeader:
    return GetPendingMessagesRequestHeader(topic=topic, max_count=10)


def counting(topic: str | None) -> CountPendingMessagesRequestHeader:
    return CountPendingMessagesRequestHeader(topic=topic, bucket_millis=1_000)


def test_a_change_needs_the_right_to_send_to_the_real_topic(cluster: LocalCluster) -> None:
    assert refusal(cluster, "shop-owner", CANCEL, by_handle(cluster, "orders", "orders")) is None
    assert refusal(cluster, "shop-owner", RESCHEDULE, by_key("orders")) is None
    assert "has no right PUB on topic 'invoices' (CANCEL_DELAYED_MESSAGE)" in str(
        refusal(cluster, "shop-owner", CANCEL, by_handle(cluster, "orders", "invoices"))
    )
    assert "has no right PUB on topic 'invoices' (RESCHEDULE_DELAYED_MESSAGE)" in str(
        refusal(cluster, "shop-owner", RESCHEDULE, by_key("invoices"))
    )


def test_a_query_needs_the_right_to_read_the_real_topic(cluster: LocalCluster) -> None:
    assert refusal(cluster, "shop-owner", LIST, listing("invoices")) is None
    assert refusal(cluster, "shop-owner", COUNT, counting("invoices")) is None
    assert refusal(cluster, "shop-owner", LIST, listing("%RETRY%billing")) is None
    assert "no right SUB on topic 'orders'" in str(refusal(cluster, "shop-owner", LIST, listing("orders")))
    assert "no right SUB on topic 'orders'" in str(refusal(cluster, "shop-owner", COUNT, counting("orders")))
    assert "no right SUB on group 'other'" in str(refusal(cluster, "shop-owner", LIST, listing("%RETRY%other")))


def test_a_request_without_a_topic_reaches_all_topics(cluster: LocalCluster) -> None:
    for access_key in ("administrator", "all-topics"):
        assert refusal(cluster, access_key, RESCHEDULE, by_key(None)) is None
        assert refusal(cluster, access_key, LIST, listing(None)) is None
        assert refusal(cluster, access_key, COUNT, counting(None)) is None
    for access_key in ("shop-owner", "all-but-orders"):
        assert refusal(cluster, access_key, RESCHEDULE, by_key(None)) == (
            f"access key {access_key!r} has no right PUB on all topics (RESCHEDULE_DELAYED_MESSAGE); name a topic"
        )
        assert "no right SUB on all topics (GET_PENDING_MESSAGES); name a topic" in str(
            refusal(cluster, access_key, LIST, listing(None))
        )


def test_a_forged_handle_changes_no_message_of_another_topic(cluster: LocalCluster) -> None:
    """The handle has the position of a message of another topic, and the name of a permitted topic."""
    forged = decode_handle(handle_of_new_message(cluster, "invoices"))._replace(topic="orders")
    header = CancelDelayedMessageRequestHeader(handle=encode_handle(forged))

    with Tool(cluster.address, Credentials(access_key="shop-owner", secret_key=SECRET)) as tool:
        change = ScheduleChangeData.decode(tool.request(CANCEL, header).body)

    assert (change.status, change.count) == ("UNKNOWN", 0)
    assert cluster.engine.delayed.count_pending(PendingQuery(topic="invoices")).total == 1


def test_an_invalid_handle_is_refused_before_the_rights_are_known(cluster: LocalCluster) -> None:
    with Tool(cluster.address, Credentials(access_key="shop-owner", secret_key=SECRET)) as tool:
        response = tool.request(CANCEL, CancelDelayedMessageRequestHeader(handle="4466"))

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert "is not a handle of a pending message" in str(response.remark)
