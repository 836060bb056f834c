"""The server with real sockets and the real clock."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, SerializeType
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.serving import subscription
from tests.server.tool import heartbeat_body, pull_header, send_header

ANY_PORT = HostAddress("127.0.0.1", 0)
ENGINE = EmbeddedSettings(listen_host=ANY_PORT)
LONG = 10_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BrokerServer]:
    """A server on disk with SYNC_FLUSH: it responds when the message is on disk."""
    settings = BrokerServerSettings(listen=ANY_PORT)
    with EmbeddedBroker(tmp_path, ENGINE) as engine, BrokerServer(engine, settings) as server:
        yield server


@pytest.fixture
def client() -> Iterator[RemotingClient]:
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    yield client
    client.close()


def send_request(topic: str, body: bytes, queue_id: int = 0) -> RemotingCommand:
    return RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, send_header(topic, queue_id), body)


def pull_request(topic: str, queue_offset: int) -> RemotingCommand:
    fields = {"sys_flag": PullSysFlag.SUSPEND | PullSysFlag.SUBSCRIPTION, "suspend_timeout_millis": LONG}
    header = pull_header(topic, queue_offset, group="readers", subscription="*", **fields)
    return RemotingCommand.request(RequestCode.PULL_MESSAGE, header)


def bodies(response: RemotingCommand) -> list[bytes]:
    assert response.code == ResponseCode.SUCCESS, response
    return [message.body for message in decode_messages(response.body, "broker-a")]


def test_messages_are_sent_and_pulled(server: BrokerServer, client: RemotingClient) -> None:
    address = str(server.address)

    responses = [client.invoke(address, send_request("orders", body), LONG) for body in (b"one", b"two")]
    read = client.invoke(address, pull_request("orders", 0), LONG)

    assert [response.header(SendMessageResponseHeader).queue_offset for response in responses] == [0, 1]
    assert bodies(read) == [b"one", b"two"]
    (message, _) = decode_messages(read.body, "broker-a")
    assert message.born_host.ip == "127.0.0.1"
    assert message.born_host.port != 0


def test_a_held_pull_does_not_block_its_connection(server: BrokerServer, client: RemotingClient) -> None:
    address = str(server.address)
    client.invoke(address, send_request("orders", b"one"), LONG)
    pulled: queue.Queue[object] = queue.Queue()

    client.invoke_async(address, pull_request("orders", 1), 2 * LONG, pulled.put)
    client.invoke(address, send_request("orders", b"two"), LONG)

    response = pulled.get(timeout=LONG / 1_000)
    assert isinstance(response, RemotingCommand)
    assert bodies(response) == [b"two"]


def test_each_of_many_concurrent_requests_gets_its_own_response(server: BrokerServer, client: RemotingClient) -> None:
    address = str(server.address)
    client.invoke(address, send_request("orders", b"first"), LONG)
    received: queue.Queue[object] = queue.Queue()

    for number in range(200):
        client.invoke_async(address, send_request("orders", b"%d" % number, number % 4), LONG, received.put)

    responses = [received.get(timeout=LONG / 1_000) for _ in range(200)]
    assert {response.code for response in responses if isinstance(response, RemotingCommand)} == {ResponseCode.SUCCESS}
    offsets = {
        (header.queue_id, header.queue_offset)
        for response in responses
        if isinstance(response, RemotingCommand)
        for header in [response.header(SendMessageResponseHeader)]
    }
    assert len(offsets) == 200


def test_routes_have_the_port_that_the_server_listens_on(server: BrokerServer, client: RemotingClient) -> None:
    """The operating system chose the port."""
    address = str(server.address)
    client.invoke(address, send_request("orders", b"one"), LONG)

    header = GetRouteInfoRequestHeader(topic="orders")
    response = client.invoke(address, RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header), LONG)

    route = TopicRouteData.decode(response.body)
    assert route.broker_datas[0].broker_addrs == {0: address}
    assert server.address.port != 0


def test_a_member_that_disconnects_is_removed(server: BrokerServer, client: RemotingClient) -> None:
    """The other member is notified at once."""
    address = str(server.address)
    pushed: queue.Queue[RemotingCommand] = queue.Queue()
    stays = RemotingClient(RemotingClientSettings(), SystemClock(), lambda channel, request: pushed.put(request))
    try:
        stays.invoke(address, heartbeat("stays"), LONG)
        client.invoke(address, heartbeat("leaves"), LONG)
        client.close()

        notified = [pushed.get(timeout=LONG / 1_000).header(ConsumerGroupRequestHeader) for _ in range(3)]
        info = server.clients.consumers.get("billing")
    finally:
        stays.close()

    assert {header.consumer_group for header in notified} == {"billing"}
    assert info is not None
    assert info.client_ids() == ["stays"]


def heartbeat(client_id: str) -> RemotingCommand:
    body = heartbeat_body(client_id, "billing", subscription("orders"))
    return RemotingCommand.request(RequestCode.HEART_BEAT, None, body)


def test_when_the_server_stops_it_answers_held_pulls(tmp_path: Path, client: RemotingClient) -> None:
    """Neither the client nor the server waits for a timeout."""
    pulled: queue.Queue[object] = queue.Queue()
    with EmbeddedBroker(tmp_path, ENGINE) as engine:
        server = BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT))
        server.start()
        address = str(server.address)
        client.invoke(address, send_request("orders", b"one"), LONG)
        client.invoke(address, pull_request("orders", 0), LONG)  # creates the group
        client.invoke_async(address, pull_request("orders", 1), 10 * LONG, pulled.put)
        client.invoke(address, send_request("orders", b"elsewhere", queue_id=1), LONG)  # After this the pull is held.

        server.stop()

        response = pulled.get(timeout=LONG / 1_000)
    assert isinstance(response, RemotingCommand)
    assert response.code == ResponseCode.PULL_NOT_FOUND


def test_the_engine_continues_to_run_after_the_server_stopped(tmp_path: Path, client: RemotingClient) -> None:
    with EmbeddedBroker(tmp_path, ENGINE) as engine:
        with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
            client.invoke(str(server.address), send_request("orders", b"remote"), LONG)
        engine.sends.send(Message("orders", b"here"), MessageQueue("orders", "broker-a", 0))

        found = engine.reader.pull(MessageQueue("orders", "broker-a", 0), 0).messages

    assert [message.body for message in found] == [b"remote", b"here"]


def test_a_server_does_not_start_on_a_used_port(server: BrokerServer, client: RemotingClient) -> None:
    address = server.remoting.address
    with EmbeddedBroker(None, ENGINE) as engine:
        second = BrokerServer(engine, BrokerServerSettings(listen=address))

        with pytest.raises(BrokerError, match=str(address.port)):
            second.start()

        assert engine.queues("orders")
    assert client.invoke(str(address), send_request("orders", b"first server"), LONG).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_a_response_has_the_encoding_of_its_request(
    server: BrokerServer, client: RemotingClient, serialize_type: SerializeType
) -> None:
    """As from RocketMQ 4.9.7. ``rocketmq-client-v4`` for Rust reads nothing else."""
    route = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="orders"))
    unknown = RemotingCommand.request(29_999)
    requests = [send_request("orders", b"x"), send_request("orders", b"y"), pull_request("orders", 0), route, unknown]
    for request in requests:
        request.serialize_type = serialize_type

    responses = [client.invoke(str(server.address), request, LONG) for request in requests]

    assert [response.serialize_type for response in responses] == [serialize_type] * len(requests)
    assert bodies(responses[2]) == [b"x", b"y"]
    assert responses[0].header(SendMessageResponseHeader).queue_offset == 0
    assert responses[-1].code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
