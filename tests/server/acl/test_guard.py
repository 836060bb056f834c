"""Access control: authentication and settings. `scripts/acl_*.script` have the rights of accounts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import QueryMessageRequestHeader
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.server.acl.rights import ROUTES
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.server.tool import ANY_PORT, Tool, make_engine, send_header

ACCOUNTS = (
    Account(access_key="shop-owner", secret_key=SECRET, topic_perms={"orders": Right.PUB, "invoices": Right.SUB}),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(engine, settings, ANY_PORT, acl=AclSettings(accounts=ACCOUNTS)) as cluster:
        for topic in ("orders", "invoices"):
            engine.create_topic(topic, 1)
        yield cluster


def credentials(access_key: str, secret_key: str = SECRET) -> Credentials:
    return Credentials(access_key=access_key, secret_key=secret_key)


def is_refused(response: RemotingCommand) -> bool:
    return response.code == ResponseCode.NO_PERMISSION


# --- authentication ---------------------------------------------------------------------------------


NO_KEY = "access control is enabled: configure the client with an access key and a secret key"


def test_broker_and_name_server_require_an_access_key(cluster: LocalCluster) -> None:
    for address in (cluster.address, cluster.name_server_address):
        with Tool(address) as anonymous:
            refused = anonymous.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)

        assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, NO_KEY)


@pytest.mark.parametrize("code", sorted(ROUTES))
def test_routes_need_no_signature_as_from_the_name_server_of_rocketmq(cluster: LocalCluster, code: int) -> None:
    """Pull consumers of the Go client v2 never sign them. A wrong signature is refused nevertheless."""
    header = GetRouteInfoRequestHeader(topic="orders")
    wrong = credentials("shop-owner", "another secret")
    for address in (cluster.address, cluster.name_server_address):
        with Tool(address) as anonymous, Tool(address, wrong) as forger:
            assert anonymous.request(code, header).code == ResponseCode.SUCCESS
            assert is_refused(forger.request(code, header))


@pytest.mark.parametrize("settings", [{"sign_routes": True}, {"is_private": True}])
def test_a_setting_requires_signed_requests_for_routes(settings: dict[str, bool]) -> None:
    """The server that ``mqtemplate run`` starts for its own workers requires them always."""
    acl = AclSettings(accounts=ACCOUNTS, **settings)
    with (
        LocalCluster(make_engine(VirtualClock()), BrokerServerSettings(listen=ANY_PORT), acl=acl) as cluster,
        Tool(cluster.address) as anonymous,
        Tool(cluster.address, credentials("shop-owner")) as authenticated,
    ):
        refused = anonymous.request(RequestCode.GET_BROKER_CLUSTER_INFO)
        permitted = authenticated.request(RequestCode.GET_BROKER_CLUSTER_INFO)

    assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, NO_KEY)
    assert permitted.code == ResponseCode.SUCCESS


def test_a_request_that_was_changed_after_signing_is_refused(cluster: LocalCluster) -> None:
    """The signature is computed from the fields and the body."""

    def is_refused_after(body: bytes = b"x", **changes: str) -> bool:
        request = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, send_header("orders"), b"x")
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


def test_one_connection_has_a_limited_number_of_client_ids() -> None:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        connection = RecordingConnection(access_key="shop-owner")
        ids = [f"client@{number}" for number in (*range(256), 0, 256)]
        *known, more = [serving.heartbeat("", producers=["x"], over=connection, client_id=each) for each in ids]

    assert {response.code for response in known} == {ResponseCode.SUCCESS}
    assert (more.code, more.remark) == (
        ResponseCode.SYSTEM_BUSY,
        "one connection may have 256 client IDs; open another connection",
    )


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
    with pytest.raises(ValueError, match=r"'READ' is not a right; allowed are PUB, SUB, PUB\|SUB and DENY"):
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
