"""Clients over sockets: telemetry, heartbeats, and their ends; access control and TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.remoting.settings import RemotingServerSettings, ServerTls, TlsMode
from mqtemplate.server import Account, AclSettings, BrokerServer, Right
from mqtemplate.server.acl.rights import GRPC_RIGHTS
from mqtemplate.server.acl.settings import Need, group_need, topic_need
from mqtemplate.server.grpc_api.context import language_name, parse_signature, version_number
from tests.remoting.certificates import Certificates, has_openssl
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    advance,
    authorization,
    consumer_settings,
    create_topic,
    endpoint,
    message,
    producer_settings,
    serving,
)
from tests.waiting import eventually

Server = BrokerServer[EmbeddedBroker]
SECRET = "a secret that is never shown"


def stream_error(stream: Any) -> grpc.StatusCode:
    """Return the status with which a stream ends."""
    with pytest.raises(grpc.RpcError) as caught:
        stream.next()
    return caught.value.code()  # type: ignore[no-any-return]


# --- telemetry ------------------------------------------------------------------------------------


def test_a_producer_is_answered_and_joins_its_topics(server: Server, tool: GrpcTool) -> None:
    answer = tool.telemetry().report(producer_settings("orders", "others"))

    assert answer.status.code == Code.OK
    assert answer.settings.publishing.max_body_size == 4 << 20
    assert sorted(server.clients.producer_groups()) == ["orders", "others"]
    assert tool.heartbeat().status.code == Code.OK


def test_a_producer_without_topics_is_answered(tool: GrpcTool) -> None:
    assert tool.telemetry().report(producer_settings()).status.code == Code.OK
    assert tool.heartbeat().status.code == Code.OK


def test_a_consumer_joins_its_group(server: Server, tool: GrpcTool) -> None:
    settings = consumer_settings("billing", "orders", kind=ClientType.PUSH_CONSUMER, expression="paid")

    answer = tool.telemetry().report(settings)

    info = server.clients.consumers["billing"]
    assert answer.settings.subscription.receive_batch_size == 32
    assert info.client_ids() == ["client-1"]
    assert (info.consume_type, info.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert info.subscriptions["orders"].sub_string == "paid"
    assert server.groups.find("billing") is not None


def test_new_settings_replace_the_old_ones(server: Server, tool: GrpcTool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders", "others"))

    stream.report(consumer_settings("billing", "orders"))

    assert list(server.clients.consumers["billing"].subscriptions) == ["orders"]


def test_a_client_may_open_another_stream(server: Server, tool: GrpcTool) -> None:
    """The older one ends; the client stays a member."""
    first, second = tool.telemetry(), tool.telemetry()
    first.report(producer_settings("orders"))

    second.report(producer_settings("orders"))

    with pytest.raises(StopIteration):
        first.next()
    assert list(server.clients.producer_groups()) == ["orders"]
    assert second.report(producer_settings("orders")).status.code == Code.OK


def test_a_client_without_a_stream_stays_a_member(server: Server, tool: GrpcTool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))
    stream.end()
    with pytest.raises(StopIteration):
        stream.next()

    assert tool.heartbeat("billing").status.code == Code.OK
    assert "billing" in server.clients.consumers


def with_client_property(name: str) -> Any:
    settings = producer_settings("orders")
    settings.client_properties[name] = "value"
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        protos.Settings(),
        producer_settings("a b"),
        producer_settings("TBW102"),
        consumer_settings("a b", "orders"),
        consumer_settings("billing", "a b"),
        consumer_settings("billing", "orders", expression="||".join(["x"] * 5_000)),
        consumer_settings("billing", "orders", expression="||"),
        with_client_property("9"),
    ],
    ids=["nothing", "topic", "system topic", "group", "subscribed topic", "expression", "no tag", "client property"],
)
def test_settings_that_are_wrong_end_the_stream(tool: GrpcTool, settings: Any) -> None:
    stream = tool.telemetry()

    stream.send(settings=settings)

    assert stream_error(stream) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_missing_group_ends_the_stream_if_it_may_not_be_created() -> None:
    with serving(auto_create_subscription_group=False) as server, GrpcTool(server) as tool:
        stream = tool.telemetry()

        stream.send(settings=consumer_settings("billing", "orders"))

        assert stream_error(stream) is grpc.StatusCode.INVALID_ARGUMENT


def test_lite_consumers_are_not_served(tool: GrpcTool) -> None:
    stream = tool.telemetry()

    stream.send(settings=consumer_settings("billing", "orders", kind=ClientType.LITE_PUSH_CONSUMER))

    assert stream_error(stream) is grpc.StatusCode.INTERNAL


def test_too_many_clients_of_a_connection_are_refused() -> None:
    with serving(max_grpc_clients_per_connection=1) as server, GrpcTool(server) as tool:
        stream = tool.telemetry()
        stream.report(producer_settings("orders"))
        tool._metadata["x-mq-client-id"] = "client-2"
        second = tool.telemetry()

        second.send(settings=producer_settings("orders"))

        assert stream_error(second) is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- heartbeats and ends --------------------------------------------------------------------------


def test_a_client_without_settings_is_unknown(tool: GrpcTool) -> None:
    assert tool.heartbeat("billing").status.code == Code.UNRECOGNIZED_CLIENT_TYPE
    assert tool.terminate().status.code == Code.UNRECOGNIZED_CLIENT_TYPE


def test_the_heartbeat_of_a_consumer_names_its_group(tool: GrpcTool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))

    assert tool.heartbeat("").status.code == Code.ILLEGAL_CONSUMER_GROUP


def test_a_client_that_leaves_is_no_member(server: Server, tool: GrpcTool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))

    assert tool.terminate("billing").status.code == Code.OK

    assert "billing" not in server.clients.consumers
    assert len(endpoint(server).service.clients) == 0
    with pytest.raises(StopIteration):
        stream.next()


def test_a_silent_client_expires(stepped: Server, stepped_tool: GrpcTool) -> None:
    stream = stepped_tool.telemetry()
    stream.report(producer_settings())

    advance(stepped, 115_000)
    assert stepped_tool.heartbeat().status.code == Code.OK
    advance(stepped, 115_000)
    assert stepped_tool.heartbeat().status.code == Code.OK
    advance(stepped, 135_000)

    assert stepped_tool.heartbeat().status.code == Code.UNRECOGNIZED_CLIENT_TYPE
    assert len(stepped.limits.grpc_clients) == 0


def test_many_clients_share_a_server(server: Server) -> None:
    """Each holds a stream; the metric counts them."""
    tools = [GrpcTool(server, f"client-{number}") for number in range(50)]
    streams = [tool.telemetry() for tool in tools]
    for stream in streams:
        assert stream.report(producer_settings("orders")).status.code == Code.OK

    samples = {sample.name: sample.value for sample in server.engine.metrics.samples()}
    assert samples["server.grpc_clients"] == 50
    for tool in tools:
        tool.channel.close()
    eventually(lambda: not endpoint(server).server.connections(), "all connections are closed")


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"), [("JAVA", "JAVA"), ("go", "GO"), ("NODE_JS", "NODE_JS"), ("COBOL", "OTHER"), ("", "OTHER")]
)
def test_an_unknown_language_is_other(text: str, name: str) -> None:
    assert language_name(text) == name


def test_a_version_is_a_number_of_rocketmq() -> None:
    assert version_number("V5_0_0") == version_number("5.0.0") == 413
    assert version_number("unknown") > 413


@pytest.mark.parametrize(
    "text",
    [
        authorization("the-key", SECRET),
        authorization("the-key", SECRET, upper=False),
        authorization("the-key//Rocketmq", SECRET),
        authorization("the-key/cn-hangzhou/RocketMQ", SECRET),
    ],
    ids=["java", "python", "go", "region"],
)
def test_every_form_of_the_signature_is_read(text: str) -> None:
    signature = parse_signature(text)

    assert signature is not None
    assert signature.access_key == "the-key"
    assert signature.is_made_with(SECRET, "20260101T000000Z")
    assert not signature.is_made_with(SECRET, "20260101T000001Z")
    assert not signature.is_made_with("another", "20260101T000000Z")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Basic abc",
        "MQv2-HMAC-SHA1",
        "MQv2-HMAC-SHA1 Credential=, SignedHeaders=, Signature=",
        "MQv2-HMAC-SHA1 Credential=a, Signature=zz",
    ],
)
def test_other_texts_are_no_signature(text: str) -> None:
    assert parse_signature(text) is None


# --- access control -------------------------------------------------------------------------------

ACL = AclSettings(
    accounts=(
        Account(access_key="the-admin", secret_key=SECRET, admin=True),
        Account(access_key="the-producer", secret_key=SECRET, topic_perms={"orders": Right.PUB}),
        Account(
            access_key="the-consumer",
            secret_key=SECRET,
            topic_perms={"orders": Right.SUB},
            group_perms={"billing": Right.SUB},
        ),
    )
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(acl=ACL) as server:
        create_topic(server, "orders")
        create_topic(server, "secrets")
        yield server


def client(server: Server, account: str, client_id: str | None = None, secret: str = SECRET) -> GrpcTool:
    return GrpcTool(server, client_id or f"client of {account}".replace(" ", "-"), keys=(account, secret))


def test_calls_need_a_valid_signature(guarded: Server) -> None:
    with GrpcTool(guarded) as unsigned, client(guarded, "the-admin", secret="wrong") as wrong:
        for tool in (unsigned, wrong):
            assert tool.route("orders").status.code == Code.UNAUTHORIZED
            assert tool.send(message("orders")).status.code == Code.UNAUTHORIZED
            assert tool.receive("billing", "orders").code is Code.UNAUTHORIZED
            stream = tool.telemetry()
            assert stream.next().status.code == Code.UNAUTHORIZED
            with pytest.raises(StopIteration):
                stream.next()


def test_a_signature_needs_its_date(guarded: Server) -> None:
    with GrpcTool(guarded, keys=("the-admin", SECRET), metadata={"x-mq-date-time": ""}) as tool:
        assert tool.route("orders").status.code == Code.UNAUTHORIZED


def test_without_access_control_signatures_are_ignored(server: Server) -> None:
    """The Python client signs with empty keys."""
    with GrpcTool(server, metadata={"authorization": "nonsense"}) as tool:
        create_topic(server, "orders")

        assert tool.send(message("orders")).status.code == Code.OK


def test_a_producer_may_only_send(guarded: Server) -> None:
    with client(guarded, "the-producer") as tool:
        assert tool.route("orders").status.code == Code.OK
        assert tool.send(message("orders")).status.code == Code.OK
        stream = tool.telemetry()
        assert stream.report(producer_settings("orders")).status.code == Code.OK
        assert tool.heartbeat().status.code == Code.OK

        assert tool.send(message("secrets")).status.code == Code.UNAUTHORIZED
        assert tool.route("secrets").status.code == Code.UNAUTHORIZED
        assert tool.receive("billing", "orders").code is Code.UNAUTHORIZED
        assert tool.ack("billing", "orders", "x").status.code == Code.UNAUTHORIZED
        assert tool.change("billing", "orders", "x", 10).status.code == Code.UNAUTHORIZED
        assert tool.forward("billing", "orders", "x").status.code == Code.UNAUTHORIZED
        assert tool.recall("secrets", "x").status.code == Code.UNAUTHORIZED
        assert tool.end_transaction("secrets", "x", 1).status.code == Code.UNAUTHORIZED
        assert tool.heartbeat("billing").status.code == Code.UNAUTHORIZED
        assert stream.report(producer_settings("orders", "secrets")).status.code == Code.UNAUTHORIZED


def test_a_consumer_may_only_receive(guarded: Server) -> None:
    with client(guarded, "the-admin") as admin, client(guarded, "the-consumer") as tool:
        admin.send(message("orders"))
        stream = tool.telemetry()
        assert stream.report(consumer_settings("billing", "orders")).status.code == Code.OK
        received = tool.receive("billing", "orders")
        assert received.code is Code.OK
        handle = received.messages[0].system_properties.receipt_handle
        assert tool.ack("billing", "orders", handle).status.code == Code.OK

        assert tool.send(message("orders")).status.code == Code.UNAUTHORIZED
        assert tool.receive("others", "orders").code is Code.UNAUTHORIZED
        assert tool.receive("billing", "secrets").code is Code.UNAUTHORIZED
        assert stream.report(consumer_settings("billing", "secrets")).status.code == Code.UNAUTHORIZED


def test_a_client_id_belongs_to_one_account(guarded: Server) -> None:
    with client(guarded, "the-admin", "shared") as first, client(guarded, "the-producer", "shared") as second:
        stream = first.telemetry()
        stream.report(producer_settings("orders"))

        other = second.telemetry()
        other.send(settings=producer_settings("orders"))

        assert other.next().status.code == Code.UNAUTHORIZED
        assert second.heartbeat().status.code == Code.UNAUTHORIZED
        assert second.terminate().status.code == Code.UNAUTHORIZED
        assert first.heartbeat().status.code == Code.OK


def needs(method: str) -> set[Need]:
    """Return what a call of a method needs that names the topic ``orders`` and the group ``billing``."""
    if method == "Telemetry":
        publishing = protos.TelemetryCommand(settings=producer_settings("orders"))
        subscribing = protos.TelemetryCommand(settings=consumer_settings("billing", "orders"))
        return {*GRPC_RIGHTS[method].needs(publishing), *GRPC_RIGHTS[method].needs(subscribing)}
    request = getattr(protos, f"{method}Request")()
    fields = request.DESCRIPTOR.fields_by_name
    if "topic" in fields:
        request.topic.name = "orders"
    if "group" in fields:
        request.group.name = "billing"
    if "message_queue" in fields:
        request.message_queue.topic.name = "orders"
    if "messages" in fields:
        request.messages.append(message("orders"))
    return set(GRPC_RIGHTS[method].needs(request))


SENDS, READS, GROUP = topic_need("orders", Right.PUB), topic_need("orders", Right.SUB), group_need("billing")
EXPECTED = {
    "QueryRoute": {topic_need("orders", Right.PUB | Right.SUB)},
    "Heartbeat": {GROUP},
    "SendMessage": {SENDS},
    "QueryAssignment": {GROUP, READS},
    "ReceiveMessage": {GROUP, READS},
    "AckMessage": {GROUP, READS},
    "ForwardMessageToDeadLetterQueue": {GROUP, READS},
    "EndTransaction": {SENDS},
    "Telemetry": {SENDS, GROUP, READS},
    "NotifyClientTermination": {GROUP},
    "ChangeInvisibleDuration": {GROUP},
    "RecallMessage": {SENDS},
    "SyncLiteSubscription": {GROUP, READS},
}


@pytest.mark.parametrize("method", GRPC_RIGHTS)
def test_a_method_needs_its_rights(method: str) -> None:
    assert needs(method) == EXPECTED[method]


def test_the_documentation_has_the_rights_of_each_method() -> None:
    page = (Path(__file__).parents[3] / "docs" / "request-rights.md").read_text(encoding="utf-8")

    for method, rights in GRPC_RIGHTS.items():
        assert f"| {method} | {rights.text} |" in page


# --- TLS ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not has_openssl(), reason="openssl is missing: it creates the certificates")
@pytest.mark.parametrize("mode", [TlsMode.ENFORCING, TlsMode.PERMISSIVE])
def test_clients_use_tls(tmp_path: Path, mode: TlsMode) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.issue("server", "IP:127.0.0.1")
    remoting = RemotingServerSettings(tls=ServerTls(cert_path=str(cert), key_path=str(key), mode=mode))
    with serving(remoting=remoting) as server:
        create_topic(server, "orders")
        with GrpcTool(server, root=certificates.authority.read_bytes()) as tool:
            assert tool.send(message("orders")).status.code == Code.OK
        with GrpcTool(server) as plain:
            if mode is TlsMode.PERMISSIVE:
                assert plain.send(message("orders")).status.code == Code.OK
            else:
                with pytest.raises(grpc.RpcError):
                    plain.send(message("orders"))
