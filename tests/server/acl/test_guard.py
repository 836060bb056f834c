"""Access control: authentication, and the rights of accounts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, LockBatchRequestBody
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    GetMaxOffsetRequestHeader,
    UnregisterClientRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    PullMessageRequestHeader,
    QueryMessageRequestHeader,
    SendMessageRequestHeaderV2,
    ViewMessageRequestHeader,
)
from mqtemplate.remoting.settings import Credentials
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from tests.server.tool import ANY_PORT, Tool, make_engine

SECRET = "a secret that is never shown"
ACCOUNTS = (
    Account(access_key="administrator", secret_key=SECRET, admin=True),
    Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB, "invoices": Right.SUB, "both": Right.PUB | Right.SUB},
        group_perms={"billing": Right.SUB},
    ),
    Account(
        access_key="all-but-orders",
        secret_key=SECRET,
        default_topic_perm=Right.PUB | Right.SUB,
        default_group_perm=Right.SUB,
        topic_perms={"orders": Right.DENY},
    ),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(engine, settings, ANY_PORT, acl=AclSettings(accounts=ACCOUNTS)) as cluster:
        for topic in ("orders", "invoices", "both"):
            engine.create_topic(topic, 1)
        yield cluster


def credentials(access_key: str, secret_key: str = SECRET) -> Credentials:
    return Credentials(access_key=access_key, secret_key=secret_key)


@pytest.fixture
def owner(cluster: LocalCluster) -> Iterator[Tool]:
    with Tool(cluster.address, credentials("shop-owner")) as tool:
        yield tool


def send_to(topic: str) -> SendMessageRequestHeaderV2:
    return SendMessageRequestHeaderV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )


def pull_from(topic: str, group: str) -> PullMessageRequestHeader:
    return PullMessageRequestHeader(
        consumer_group=group,
        topic=topic,
        queue_id=0,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=0,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
    )


def heartbeat_of(group: str, *topics: str) -> bytes:
    subscriptions = [SubscriptionData(topic=topic) for topic in topics]
    data = ConsumerData(group_name=group, subscription_data_set=subscriptions)
    return HeartbeatData(client_id="me@1", consumer_data_set=[data]).encode()


def is_refused(response: RemotingCommand) -> bool:
    return response.code == ResponseCode.NO_PERMISSION


# --- authentication ---------------------------------------------------------------------------------


def test_broker_and_name_server_require_an_access_key(cluster: LocalCluster) -> None:
    header = GetRouteInfoRequestHeader(topic="orders")
    for address in (cluster.address, cluster.name_server_address):
        with Tool(address) as anonymous, Tool(address, credentials("shop-owner")) as authenticated:
            refused = anonymous.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
            permitted = authenticated.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)

        assert refused.code == ResponseCode.NO_PERMISSION
        assert refused.remark == ("access control is enabled: configure the client with an access key and a secret key")
        assert permitted.code == ResponseCode.SUCCESS


@pytest.mark.parametrize(("access_key", "secret_key"), [("shop-owner", "wrong secret"), ("missing-here", SECRET)])
def test_a_wrong_secret_key_and_an_unknown_access_key_have_the_same_response(
    cluster: LocalCluster, access_key: str, secret_key: str
) -> None:
    """An attacker does not learn which of the two is wrong."""
    with Tool(cluster.address, credentials(access_key, secret_key)) as tool:
        response = tool.request(RequestCode.SEND_MESSAGE_V2, send_to("orders"), b"x")

    assert response.code == ResponseCode.NO_PERMISSION
    assert response.remark == f"access key '{access_key}' is unknown, or its secret key is wrong"


def test_older_clients_receive_the_code_of_acl_1(cluster: LocalCluster) -> None:
    with Tool(cluster.address) as tool:
        response = tool.request(RequestCode.SEND_MESSAGE_V2, send_to("orders"), b"x", version=409)

    assert response.code == ResponseCode.SYSTEM_ERROR


def test_a_request_that_was_changed_after_signing_is_refused(cluster: LocalCluster) -> None:
    """The signature is computed from the fields and the body."""

    def is_refused_after(body: bytes = b"x", **changes: str) -> bool:
        request = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, send_to("orders"), b"x")
        sign_command(request, "shop-owner", SECRET)
        request.body = body
        request.ext_fields |= changes
        with Tool(cluster.address) as tool:
            return is_refused(tool.send_request(request))

    refused = [is_refused_after(), is_refused_after(b"y"), is_refused_after(e="1"), is_refused_after(more="field")]
    assert refused == [False, True, True, True]


def test_a_request_of_4_9_3_may_leave_one_field_unsigned(cluster: LocalCluster) -> None:
    """Up to that version the client added the flag for a query by unique key after signing."""
    header = QueryMessageRequestHeader(topic="invoices", key="k", max_num=1, begin_timestamp=0, end_timestamp=1)
    codes = []
    for version in (399, 401):
        request = RemotingCommand.request(RequestCode.QUERY_MESSAGE, header)
        request.version = version
        sign_command(request, "shop-owner", SECRET)
        request.ext_fields["_UNIQUE_KEY_QUERY"] = "true"
        with Tool(cluster.address) as tool:
            codes.append(tool.send_request(request).code)

    assert codes == [ResponseCode.QUERY_NOT_FOUND, ResponseCode.SYSTEM_ERROR]


@pytest.fixture
def new_period(cluster: LocalCluster) -> None:
    """Let the minute pass in which refusals of other tests were logged."""
    cluster.engine.clock.move_ms(60_000)


@pytest.mark.usefixtures("new_period")
def test_repeated_refusals_of_a_client_are_logged_once_as_a_warning(cluster: LocalCluster) -> None:
    with structlog.testing.capture_logs() as logged, Tool(cluster.address) as first, Tool(cluster.address) as second:
        for tool in (first, first, first, second):
            tool.request(RequestCode.GET_BROKER_CONFIG)

    levels = [event["log_level"] for event in logged if event["event"] == "acl.refused"]
    assert levels == ["warning", "debug", "debug", "warning"]


@pytest.mark.usefixtures("new_period")
def test_the_refusals_of_many_connections_are_ten_lines_a_minute_and_a_count(cluster: LocalCluster) -> None:
    def refuse(connections: int) -> None:
        for _ in range(connections):
            with Tool(cluster.address) as tool:
                tool.request(RequestCode.GET_BROKER_CONFIG)

    with structlog.testing.capture_logs() as logged:
        refuse(25)
        cluster.engine.clock.move_ms(60_000)
        refuse(1)

    warnings = [event for event in logged if event["event"] == "acl.refused" and event["log_level"] == "warning"]
    assert [event.get("suppressed", 0) for event in warnings] == [0] * 10 + [15]


# --- rights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "header", "body"),
    [
        (RequestCode.SEND_MESSAGE_V2, send_to("orders"), b"x"),
        (RequestCode.SEND_MESSAGE_V2, send_to("both"), b"x"),
        (RequestCode.HEART_BEAT, None, heartbeat_of("billing", "invoices", "%RETRY%billing")),
        (RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic="orders", queue_id=0), b""),
        (RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic="invoices", queue_id=0), b""),
        (
            RequestCode.LOCK_BATCH_MQ,
            None,
            LockBatchRequestBody(consumer_group="billing", client_id="me@1", mq_set=[]).encode(),
        ),
        (RequestCode.UNREGISTER_CLIENT, UnregisterClientRequestHeader(client_id="me@1", consumer_group="billing"), b""),
    ],
)
def test_a_request_with_the_needed_right_is_permitted(
    owner: Tool, code: RequestCode, header: CommandHeader | None, body: bytes
) -> None:
    assert owner.request(code, header, body).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    ("code", "header", "body", "text"),
    [
        (RequestCode.SEND_MESSAGE_V2, send_to("invoices"), b"x", "no right PUB on topic 'invoices' (SEND_MESSAGE_V2)"),
        (RequestCode.SEND_MESSAGE_V2, send_to("new"), b"x", "no right PUB on topic 'new' (SEND_MESSAGE_V2)"),
        (RequestCode.SEND_MESSAGE_V2, send_to("%RETRY%other"), b"x", "no right SUB on group 'other'"),
        (RequestCode.PULL_MESSAGE, pull_from("orders", "billing"), b"", "no right SUB on topic 'orders'"),
        (RequestCode.PULL_MESSAGE, pull_from("invoices", "other"), b"", "no right SUB on group 'other'"),
        (RequestCode.PULL_MESSAGE, pull_from("%RETRY%other", "billing"), b"", "no right SUB on group 'other'"),
        (RequestCode.PULL_MESSAGE, pull_from("%DLQ%other", "billing"), b"", "no right SUB on group 'other'"),
        (RequestCode.HEART_BEAT, None, heartbeat_of("other"), "no right SUB on group 'other'"),
        (RequestCode.HEART_BEAT, None, heartbeat_of("billing", "orders"), "no right SUB on topic 'orders'"),
        (
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            ConsumerGroupRequestHeader(consumer_group="other"),
            b"",
            "no right SUB on group 'other'",
        ),
        (
            RequestCode.CONSUMER_SEND_MSG_BACK,
            ConsumerSendMsgBackRequestHeader(offset=0, group="other", delay_level=0),
            b"",
            "no right SUB on group 'other'",
        ),
        (
            RequestCode.END_TRANSACTION,
            EndTransactionRequestHeader(
                topic="invoices",
                producer_group="p",
                tran_state_table_offset=0,
                commit_log_offset=0,
                commit_or_rollback=8,
                msg_id="",
            ),
            b"",
            "no right PUB on topic 'invoices'",
        ),
        (
            RequestCode.GET_MAX_OFFSET,
            GetMaxOffsetRequestHeader(topic="new", queue_id=0),
            b"",
            "no right PUB|SUB on topic 'new'",
        ),
        (
            RequestCode.VIEW_MESSAGE_BY_ID,
            ViewMessageRequestHeader(offset=0),
            b"",
            "may not request VIEW_MESSAGE_BY_ID: only an account with admin: true may",
        ),
        (RequestCode.GET_BROKER_CONFIG, None, b"", "may not request GET_BROKER_CONFIG"),
    ],
)
def test_a_refusal_names_the_missing_right(
    owner: Tool, code: int, header: CommandHeader | None, body: bytes, text: str
) -> None:
    response = owner.request(code, header, body)

    assert response.code == ResponseCode.NO_PERMISSION
    assert response.remark is not None
    assert response.remark.startswith("access key 'shop-owner' ")
    assert text in response.remark


def test_the_default_rights_apply_to_topics_and_groups_that_are_not_listed(cluster: LocalCluster) -> None:
    with Tool(cluster.address, credentials("all-but-orders")) as tool:
        assert tool.request(RequestCode.SEND_MESSAGE_V2, send_to("both"), b"x").code == ResponseCode.SUCCESS
        assert is_refused(tool.request(RequestCode.SEND_MESSAGE_V2, send_to("orders"), b"x"))
        assert tool.request(RequestCode.HEART_BEAT, body=heartbeat_of("any", "invoices")).code == ResponseCode.SUCCESS


def test_an_administrator_has_all_rights(cluster: LocalCluster) -> None:
    with Tool(cluster.address, credentials("administrator")) as tool:
        assert tool.request(RequestCode.GET_BROKER_CONFIG).code == ResponseCode.SUCCESS
        assert tool.request(RequestCode.SEND_MESSAGE_V2, send_to("new"), b"x").code == ResponseCode.SUCCESS


def test_a_malformed_request_does_not_bypass_the_check(owner: Tool) -> None:
    response = owner.request(RequestCode.SEND_MESSAGE_V2, None, b"x")

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark is not None
    assert "needs the field b" in response.remark


# --- settings ---------------------------------------------------------------------------------------


def test_secret_keys_are_not_shown() -> None:
    assert SECRET not in repr(AclSettings(accounts=ACCOUNTS))


@pytest.mark.parametrize(
    ("text", "right", "shown"),
    [
        ("PUB", Right.PUB, "PUB"),
        ("sub", Right.SUB, "SUB"),
        ("SUB | PUB", Right.PUB | Right.SUB, "PUB|SUB"),
        ("DENY", Right.DENY, "DENY"),
    ],
)
def test_rights_are_parsed_from_rocketmqs_names(text: str, right: Right, shown: str) -> None:
    assert (Right.parse(text), str(right)) == (right, shown)


def test_an_unknown_right_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'READ' is no right; allowed are PUB, SUB, PUB\|SUB and DENY"):
        Right.parse("READ")


def test_a_short_key_is_refused_without_being_shown() -> None:
    text = "the secret-key of an account must have at least 7 characters, it has 6"
    with pytest.raises(ConfigurationError, match=text) as refused:
        Account(access_key="long enough", secret_key="sssssh")

    assert "sssssh" not in str(refused.value)


def test_two_accounts_with_the_same_access_key_are_refused() -> None:
    account = Account(access_key="shop-owner", secret_key=SECRET)

    with pytest.raises(ConfigurationError, match="access-key 'shop-owner' has two accounts; keep one"):
        AclSettings(accounts=(account, account))
