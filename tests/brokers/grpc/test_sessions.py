"""Sessions at a proxy: heartbeats, settings after a restart, and commands."""

from __future__ import annotations

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import GrpcBroker, GrpcSettings
from mqtemplate.brokers.grpc.sessions import TelemetryStream
from mqtemplate.errors import BrokerError, DestinationError, RemoteTimeoutError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.message import Message
from mqtemplate.selectors.tags import TagSelector
from tests.brokers.grpc.scripted_proxy import ScriptedProxy, status
from tests.waiting import eventually

ORDER = Message("orders", b"order")
SPEC = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")})


def test_a_producer_and_a_member_have_ids_of_their_own(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    """A proxy keeps one kind of settings for an id."""
    broker.sends.send(ORDER)
    producer = proxy.metadata["SendMessage"]["x-mq-client-id"]
    broker.pop.join(SPEC)
    broker.pop.ack("billing", "orders", "receipt")

    assert proxy.metadata["AckMessage"]["x-mq-client-id"] != producer


def test_heartbeats_name_the_group_of_a_member(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    broker.sends.send(ORDER)
    broker.pop.join(SPEC)
    proxy.requests["Heartbeat"].clear()

    for session in (broker.sends.session, *broker.pop.sessions()):
        session.heartbeat()

    assert [(each.client_type, each.group.name) for each in proxy.requests["Heartbeat"]] == [
        (ClientType.PRODUCER, ""),
        (ClientType.PUSH_CONSUMER, "billing"),
    ]


def test_a_proxy_that_has_lost_the_settings_gets_them_again(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    broker.pop.join(SPEC)
    lost = status(Code.UNRECOGNIZED_CLIENT_TYPE, "cannot find client settings")
    proxy.answers["Heartbeat"] = lambda _: protos.HeartbeatResponse(status=lost)

    broker.pop.session_of("billing").heartbeat()

    eventually(lambda: len(proxy.requests["Telemetry"]) == 2, "the settings have arrived again")


def test_after_a_restart_of_the_proxy_the_client_is_known_again(proxy: ScriptedProxy) -> None:
    with GrpcBroker(GrpcSettings(endpoints=proxy.address)) as broker:
        broker.sends.send(ORDER)
        proxy.__exit__(None, None, None)

        with ScriptedProxy(proxy.port) as again:
            result = broker.sends.send(ORDER, timeout_ms=20_000)

            eventually(lambda: len(again.requests["Telemetry"]) == 1, "the settings have arrived")
            assert again.requests["SendMessage"][0].messages[0].system_properties.message_id == result.msg_id


def test_an_administrator_gets_the_stacks_of_all_threads(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    broker.sends.send(ORDER)
    command = protos.TelemetryCommand()
    command.print_thread_stack_trace_command.nonce = "N-1"

    answer = broker.sends.session.on_command(
        "print_thread_stack_trace_command", command, broker.settings.parsed_endpoints
    )

    assert answer.thread_stack_trace.nonce == "N-1"
    assert "MainThread" in answer.thread_stack_trace.thread_stack_trace


def test_a_message_is_not_consumed_on_request(broker: GrpcBroker) -> None:
    command = protos.TelemetryCommand()
    command.verify_message_command.nonce = "N-1"

    answer = broker.sends.session.on_command("verify_message_command", command, broker.settings.parsed_endpoints)

    assert (answer.status.code, answer.verify_message_result.nonce) == (Code.NOT_IMPLEMENTED, "N-1")


def test_a_proxy_that_does_not_answer_the_settings_is_named(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers_settings = False
    stream = TelemetryStream(broker.sends.session, broker.settings.parsed_endpoints)

    with pytest.raises(
        RemoteTimeoutError, match=r"127\.0\.0\.1:\d+ did not answer the settings of the producer in 50 ms"
    ):
        stream.wait_for_settings(50)
    stream.close()


# --- routes ---------------------------------------------------------------------------------------


def test_a_route_is_requested_once(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    for _ in range(3):
        broker.queues("orders")

    assert len(proxy.requests["QueryRoute"]) == 1


def test_a_refreshed_route_has_new_queues_and_keeps_what_cannot_be_had(
    proxy: ScriptedProxy, broker: GrpcBroker
) -> None:
    broker.queues("orders")
    proxy.brokers = ["broker-a", "broker-b"]
    broker._client.routes.refresh()
    proxy.answers["QueryRoute"] = lambda _: protos.QueryRouteResponse(status=status(Code.INTERNAL_SERVER_ERROR, "busy"))
    broker._client.routes.refresh()

    assert [queue.broker_name for queue in broker.queues("orders")] == ["broker-a", "broker-b"]


def test_a_deleted_topic_is_unknown_after_the_refresh(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    broker.queues("orders")
    proxy.answers["QueryRoute"] = lambda _: protos.QueryRouteResponse(status=status(Code.TOPIC_NOT_FOUND, "no route"))
    broker._client.routes.refresh()

    with pytest.raises(DestinationError, match="topic 'orders' is not known"):
        broker.queues("orders")


def test_a_refused_route_is_an_error_with_its_reason(proxy: ScriptedProxy, broker: GrpcBroker) -> None:
    proxy.answers["QueryRoute"] = lambda _: protos.QueryRouteResponse(status=status(Code.FORBIDDEN, "no right"))

    with pytest.raises(BrokerError, match=r"route of 'orders': .*40300 FORBIDDEN: no right"):
        broker.queues("orders")
