"""Metadata, signatures and errors of requests."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime

import grpc
import pytest

from mqtemplate.brokers import GrpcBroker, GrpcSettings
from mqtemplate.brokers.grpc.channels import Channels, check_status, request_metadata, send_error
from mqtemplate.brokers.grpc.settings import Endpoints
from mqtemplate.brokers.remote.cluster.failures import Outages
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerClosedError,
    BrokerError,
    ConfigurationError,
    DelayError,
    DestinationError,
    InvalidReceiptHandleError,
    MessageError,
    MQTemplateError,
    RemoteConnectError,
    SendError,
    UnsupportedError,
)
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.remoting.identity import ClientTls, Credentials
from tests.brokers.grpc.scripted_proxy import ScriptedProxy, status

_NOW = datetime(2026, 8, 1, 12, 30, 5, tzinfo=UTC)


# --- outages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_to_a_request_from_before_an_outage_does_not_end_it(is_async: bool) -> None:
    """Another thread reports that the connection was lost while the answer is on its way."""
    with ScriptedProxy() as proxy:
        settings, outages = GrpcSettings(endpoints=proxy.address), Outages(VirtualClock())
        channels, endpoints = Channels(settings, outages), settings.parsed_endpoints

        def request() -> None:
            given = (endpoints, "client-1", "Heartbeat", protos.HeartbeatRequest(), "a test", 30_000)
            if is_async:
                answer: Future[object] = Future()
                channels.call_async(*given, answer.set_result)
                answer.result()
            else:
                channels.call(*given)

        def lose(_: object) -> object:
            outages.report(str(endpoints), RemoteConnectError("the connection was lost"), outages.changes)
            return protos.HeartbeatResponse(status=status())

        proxy.answers["Heartbeat"] = lose
        request()
        assert outages.describe() is not None
        del proxy.answers["Heartbeat"]
        request()
        assert outages.describe() is None
        channels.close()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("proxy.example.com:8081", "dns:///proxy.example.com:8081"),
        ("10.0.0.1:8081", "ipv4:10.0.0.1:8081"),
        ("10.0.0.1:8081; 10.0.0.2:8082", "ipv4:10.0.0.1:8081,10.0.0.2:8082"),
        ("[::1]:8081", "ipv6:[::1]:8081"),
    ],
)
def test_endpoints_have_the_target_of_their_kind(text: str, target: str) -> None:
    assert Endpoints.parse(text).target == target


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"allowed are 'host:port', or several numeric addresses .*, got ''"),
        ("proxy", r"the port of RocketMQ's proxy is 8081 by default, got 'proxy'"),
        ("proxy:99999", r"allowed are 'host:port'"),
        ("a:8081;b:8081", r"must all be numeric IPv4 or all IPv6; for names give one 'host:port'"),
    ],
)
def test_the_error_for_endpoints_has_the_allowed_forms(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        GrpcSettings(endpoints=text)


# --- metadata -------------------------------------------------------------------------------------


def test_each_request_names_its_client() -> None:
    found = dict(request_metadata(GrpcSettings(endpoints="a:1", namespace="shop"), "client-1", _NOW))

    assert {name: found[name] for name in ("x-mq-client-id", "x-mq-language", "x-mq-date-time", "x-mq-namespace")} == {
        "x-mq-client-id": "client-1",
        "x-mq-language": "PYTHON",
        "x-mq-date-time": "20260801T123005Z",
        "x-mq-namespace": "shop",
    }
    assert "authorization" not in found


def test_a_request_is_signed_over_its_time() -> None:
    """The digest is that of ``printf %s 20260801T123005Z | openssl dgst -sha1 -hmac secret``."""
    credentials = Credentials(access_key="shop", secret_key="secret", security_token="token")

    found = dict(request_metadata(GrpcSettings(endpoints="a:1", credentials=credentials), "client-1", _NOW))

    assert found["authorization"] == (
        "MQv2-HMAC-SHA1 Credential=shop, SignedHeaders=x-mq-date-time, "
        "Signature=6440B3D90877C1C95AFADB466A8085BD10B1D9EF"
    )
    assert found["x-mq-session-token"] == "token"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (Code.TOO_MANY_REQUESTS, BrokerBusyError, "try again later"),
        (Code.NOT_IMPLEMENTED, UnsupportedError, "50100 NOT_IMPLEMENTED: why"),
        (Code.INVALID_RECEIPT_HANDLE, InvalidReceiptHandleError, "40013 INVALID_RECEIPT_HANDLE: why"),
        (Code.UNAUTHORIZED, BrokerError, "check access-key and secret-key"),
        (Code.ILLEGAL_INVISIBLE_TIME, BrokerError, "10 s to 12 h"),
        (Code.CONSUMER_GROUP_NOT_FOUND, BrokerError, "mqadmin updateSubGroup"),
    ],
)
def test_a_refused_request_is_an_error_with_advice(code: Code, kind: type[BrokerError], text: str) -> None:
    with pytest.raises(kind, match=text) as refusal:
        check_status(status(code, "why"), "do it", "proxy:8081")

    assert type(refusal.value) is kind
    assert str(refusal.value).startswith(f"do it: proxy:8081 answered {code.value} {code.name}: why")


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (Code.TOPIC_NOT_FOUND, DestinationError, r"mqadmin updateTopic"),
        (Code.ILLEGAL_DELIVERY_TIME, DelayError, r"maxDelayTimeMills \(1 day by default\)"),
        (Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, MessageError, r"DELAY with a delay, FIFO with a hash_key"),
        (Code.MESSAGE_BODY_TOO_LARGE, MessageError, r"41301"),
        (Code.FORBIDDEN, SendError, r"access control"),
        (Code.UNSUPPORTED, UnsupportedError, r"50500"),
    ],
)
def test_the_class_of_a_send_error_tells_whether_a_retry_helps(
    code: Code, kind: type[MQTemplateError], text: str
) -> None:
    error = send_error(status(code, "why"), "send it", "proxy:8081")

    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error


def test_a_code_that_is_not_known_is_shown_as_it_is() -> None:
    with pytest.raises(BrokerError, match="proxy:8081 answered 49999: why"):
        check_status(status(49_999, "why"), "do it", "proxy:8081")  # type: ignore[arg-type]


def test_no_proxy_at_an_address_is_a_connect_error_with_it() -> None:
    broker = GrpcBroker(GrpcSettings(endpoints="127.0.0.1:1", request_timeout_ms=5_000))

    with pytest.raises(RemoteConnectError, match=r"first request: 127\.0\.0\.1:1: no connection") as refusal:
        broker.start()

    assert not refusal.value.was_sent


def test_a_server_of_another_service_is_named_with_the_setting() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(UnsupportedError, match=r"not the gRPC port of a proxy, correct rocketmq\.endpoints"):
            GrpcBroker(GrpcSettings(endpoints=f"127.0.0.1:{port}")).start()
    finally:
        server.stop(0).wait()


def test_a_client_that_access_control_refuses_does_not_start(proxy: ScriptedProxy) -> None:
    proxy.answers["Heartbeat"] = lambda _: protos.HeartbeatResponse(status=status(Code.UNAUTHORIZED, "no such user"))

    with pytest.raises(BrokerError, match="no such user; check access-key and secret-key"):
        GrpcBroker(GrpcSettings(endpoints=proxy.address)).start()


def test_a_private_key_with_a_password_is_refused() -> None:
    tls = ClientTls(cert_path="cert.pem", key_path="key.pem", key_password="secret")

    with pytest.raises(UnsupportedError, match=r"must have no password; store it without one \(openssl pkey"):
        GrpcBroker(GrpcSettings(endpoints="127.0.0.1:1", tls=tls)).start()


def test_a_missing_tls_file_is_named() -> None:
    tls = ClientTls(trust_cert_path="/nowhere/ca.pem")

    with pytest.raises(ConfigurationError, match=r"the TLS file /nowhere/ca\.pem cannot be read: .*correct the path"):
        GrpcBroker(GrpcSettings(endpoints="127.0.0.1:1", tls=tls)).start()


def test_a_broker_that_is_not_started_says_so() -> None:
    broker = GrpcBroker(GrpcSettings(endpoints="127.0.0.1:1"))

    with pytest.raises(BrokerClosedError, match=r"'127\.0\.0\.1:1' is not running; call start\(\) first"):
        _ = broker.sends


def test_without_grpcio_the_setting_and_the_command_to_install_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mqtemplate.brokers.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)

    with pytest.raises(ModuleNotFoundError, match=r"rocketmq\.endpoints needs grpcio .*; pip install "):
        importlib.import_module("mqtemplate.brokers.grpc.broker")


def test_the_settings_of_a_proxy_need_no_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the configuration of an application is checked before anything is installed."""
    for name in [name for name in sys.modules if name.startswith("mqtemplate.brokers.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)

    assert importlib.import_module("mqtemplate.brokers.grpc.settings").GrpcSettings(endpoints="a:1").endpoints == "a:1"
