"""Requests that a broker sends to a client, and the signatures of a client's requests."""

from __future__ import annotations

import queue

from structlog.testing import capture_logs

from mqtemplate.remoting import Connection, Credentials, RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand
from mqtemplate.remoting.protocol.acl import is_signed_with
from tests.remoting.conftest import NewClient
from tests.remoting.wire import (
    LONG_MS,
    UNKNOWN,
    EchoServer,
    Results,
    address_of,
    echo,
    refuse_with_go_away,
    response_of,
)
from tests.waiting import PATIENCE_S

# --- requests of brokers --------------------------------------------------------------------------------


def test_the_processor_of_a_brokers_request_may_block(server: EchoServer, new_client: NewClient) -> None:
    """It runs in a worker thread and may send requests to the same broker."""

    def on_request(channel: Connection, request: RemotingCommand) -> RemotingCommand:
        inner = client.invoke(address_of(server), echo(b"inner"), LONG_MS)
        return request.response(body=request.body + b"; " + inner.body)

    client = new_client(on_request=on_request)
    client.invoke(address_of(server), echo(), LONG_MS)
    results: Results = queue.Queue()

    server.connections()[0].request(RemotingCommand(39, body=b"state?"), LONG_MS, results.put)

    assert response_of(results).body == b"state?; inner"


def test_a_brokers_request_may_be_answered_later_or_by_another_request(
    server: EchoServer, new_client: NewClient
) -> None:
    """A transaction check is one-way, and its answer is END_TRANSACTION on the same connection."""
    requests: queue.Queue[tuple[Connection, RemotingCommand]] = queue.Queue()
    client = new_client(on_request=lambda channel, request: requests.put((channel, request)))
    client.invoke(address_of(server), echo(), LONG_MS)
    server.seen.get()
    results: Results = queue.Queue()
    server.connections()[0].request(RemotingCommand(39), LONG_MS, results.put)
    channel, request = requests.get(timeout=PATIENCE_S)

    channel.send_one_way(echo(b"committed"))
    channel.reply(request.response(remark="later"))

    assert response_of(results).remark == "later"
    assert server.seen.get(timeout=PATIENCE_S).body == b"committed"


def test_a_client_without_a_processor_refuses_a_brokers_request(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(address_of(server), echo(), LONG_MS)
    results: Results = queue.Queue()
    (connection,) = server.connections()

    connection.send_one_way(RemotingCommand(UNKNOWN))
    connection.request(RemotingCommand(220), LONG_MS, results.put)

    response = response_of(results)
    assert (response.code, response.remark) == (
        3,
        "request code 220 RESET_CONSUMER_CLIENT_OFFSET is not supported here",
    )


def test_the_exception_of_a_clients_processor_is_the_response(server: EchoServer, new_client: NewClient) -> None:
    def on_request(channel: Connection, request: RemotingCommand) -> RemotingCommand:
        raise ValueError("no such group")

    client = new_client(on_request=on_request)
    client.invoke(address_of(server), echo(), LONG_MS)
    results: Results = queue.Queue()

    with capture_logs() as logs:
        server.connections()[0].request(RemotingCommand(307), LONG_MS, results.put)
        response = response_of(results)

    assert (response.code, response.remark) == (1, "ValueError: no such group")
    assert "remoting.request_failed" in [entry["event"] for entry in logs]


# --- signatures -----------------------------------------------------------------------------------------


def test_every_request_is_signed(server: EchoServer, new_client: NewClient) -> None:
    """Including one-way requests, and requests that a processor sends on the connection of a broker's request."""
    credentials = Credentials(access_key="AK", secret_key="SK12345", security_token="lent")
    channels: queue.Queue[Connection] = queue.Queue()
    client = new_client(
        RemotingClientSettings(credentials=credentials), on_request=lambda channel, request: channels.put(channel)
    )
    results: Results = queue.Queue()

    client.invoke(address_of(server), echo(b"B", topic="T1"), LONG_MS)
    client.invoke_async(address_of(server), echo(b"B", topic="T1"), LONG_MS, results.put)
    response_of(results)
    client.invoke_one_way(address_of(server), echo(b"B", topic="T1"))
    server.connections()[0].send_one_way(RemotingCommand(39))
    channels.get(timeout=PATIENCE_S).send_one_way(echo(b"B", topic="T1"))

    for _ in range(4):
        seen = server.seen.get(timeout=PATIENCE_S)
        assert is_signed_with(seen, "SK12345")
        assert not is_signed_with(seen, "SK12346")
        assert (seen.ext_fields["AccessKey"], seen.ext_fields["SecurityToken"]) == ("AK", "lent")


def test_a_repeated_request_is_signed_again(server: EchoServer, new_client: NewClient) -> None:
    client = new_client(RemotingClientSettings(credentials=Credentials(access_key="AK", secret_key="SK")))
    refuse_with_go_away(server, 1)

    client.invoke(address_of(server), echo(b"B", topic="T1"), LONG_MS)

    assert is_signed_with(server.seen.get(timeout=PATIENCE_S), "SK")


def test_requests_without_credentials_have_no_signature(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(address_of(server), echo(topic="T1"), LONG_MS)

    assert server.seen.get().ext_fields == {"topic": "T1"}


def test_the_repr_of_settings_has_no_secrets() -> None:
    shown = repr(
        RemotingClientSettings(credentials=Credentials(access_key="AK", secret_key="S3", security_token="T0K"))
    )

    assert "AK" in shown
    assert "S3" not in shown
    assert "T0K" not in shown
