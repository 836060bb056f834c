"""The client: each request ends with a response, an error with its reason, or a timeout."""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ConfigurationError,
    MessageError,
    RemoteConnectError,
    RemoteTimeoutError,
)
from mqtemplate.remoting import Credentials, RemotingClient, RemotingClientSettings, RemotingServerSettings
from mqtemplate.remoting.connection import next_opaque
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode, Version
from tests.remoting.conftest import NewClient, StartServer
from tests.remoting.wire import (
    BIG,
    ECHO,
    HOLD,
    LONG_MS,
    EchoServer,
    Results,
    address_of,
    echo,
    echoed,
    error_of,
    full_backlog,
    in_threads,
    refuse_with_go_away,
    response_of,
)
from tests.waiting import PATIENCE_S, eventually


def unused_address() -> str:
    """Return an address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def each_way_raises(
    client: RemotingClient, address: str, error: type[Exception], match: str, body: bytes = b""
) -> None:
    """Send in each of the three ways. The error is raised at once, and no callback is called."""
    never: Results = queue.Queue()
    for call in (
        lambda: client.invoke_async(address, echo(body), LONG_MS, never.put),
        lambda: client.invoke(address, echo(body), LONG_MS),
        lambda: client.invoke_one_way(address, echo(body)),
    ):
        with pytest.raises(error, match=match):
            call()
    assert never.empty()


# --- responses ------------------------------------------------------------------------------------------


def test_a_request_gets_its_response(server: EchoServer, client: RemotingClient) -> None:
    response = client.invoke(address_of(server), echo(b"body", a="1"), LONG_MS)

    assert (response.code, response.body, response.ext_fields) == (0, b"body", {"a": "1"})


def test_each_of_many_threads_gets_its_own_responses(server: EchoServer, client: RemotingClient) -> None:
    in_threads(8, lambda thread: [echoed(client, server, b"%d:%d" % (thread, number)) for number in range(100)])

    assert server.seen.qsize() == 800
    assert len(server.connections()) == 1, "all threads share one connection"


def test_responses_may_arrive_in_any_order(server: EchoServer, client: RemotingClient) -> None:
    results: Results = queue.Queue()
    client.invoke_async(address_of(server), RemotingCommand(HOLD, body=b"held"), LONG_MS, results.put)
    client.invoke_async(address_of(server), echo(b"quick"), LONG_MS, results.put)

    first = response_of(results)
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response(body=held.body))

    assert (first.body, response_of(results).body) == (b"quick", b"held")


def test_a_callback_may_send_the_next_request(server: EchoServer, client: RemotingClient) -> None:
    """A consumer does so: it pulls again when a pull has returned."""
    results: Results = queue.Queue()

    def again(result: RemotingCommand | BrokerError) -> None:
        assert isinstance(result, RemotingCommand)
        left = int(result.body) - 1
        if left:
            client.invoke_async(address_of(server), echo(b"%d" % left), LONG_MS, again)
        else:
            results.put(result)

    client.invoke_async(address_of(server), echo(b"50"), LONG_MS, again)

    assert response_of(results).body == b"1"


def test_a_blocking_call_in_a_callback_raises_an_error(server: EchoServer, client: RemotingClient) -> None:
    """It would wait for the thread that it blocks."""
    errors: queue.Queue[str] = queue.Queue()

    def block(result: RemotingCommand | BrokerError) -> None:
        with pytest.raises(RuntimeError) as raised:
            client.invoke(address_of(server), echo(), LONG_MS)
        errors.put(str(raised.value))

    client.invoke_async(address_of(server), echo(), LONG_MS, block)

    assert errors.get(timeout=PATIENCE_S).endswith("use invoke_async()")


def test_the_exception_of_a_callback_is_logged_and_the_next_callback_runs(
    server: EchoServer, client: RemotingClient
) -> None:
    results: Results = queue.Queue()

    with capture_logs() as logs:
        client.invoke_async(address_of(server), echo(), LONG_MS, lambda result: 1 // 0)
        client.invoke_async(address_of(server), echo(b"next"), LONG_MS, results.put)
        assert response_of(results).body == b"next"

    assert "remoting.callback_failed" in [entry["event"] for entry in logs]


def test_a_one_way_request_is_marked_and_sent(server: EchoServer, client: RemotingClient) -> None:
    client.invoke_one_way(address_of(server), echo(b"by the way"))

    seen = server.seen.get(timeout=PATIENCE_S)
    assert (seen.is_one_way, seen.body) == (True, b"by the way")


def test_a_one_way_request_from_a_callback_does_not_block_it(start_server: StartServer, client: RemotingClient) -> None:
    first, second = start_server(), start_server()

    def notify(result: RemotingCommand | BrokerError) -> None:
        client.invoke_one_way(address_of(second), echo(b"by the way"))

    client.invoke_async(address_of(first), echo(), LONG_MS, notify)

    assert second.seen.get(timeout=PATIENCE_S).body == b"by the way"


def test_a_large_request_and_a_large_response_arrive_complete(server: EchoServer, client: RemotingClient) -> None:
    echoed(client, server, bytes(range(256)) * 60_000)

    assert client.invoke(address_of(server), RemotingCommand(BIG, body=b"16000000"), LONG_MS).body == bytes(16_000_000)


def test_a_request_too_large_for_a_frame_is_refused_at_once(server: EchoServer, client: RemotingClient) -> None:
    """With and without an open connection; no request stays pending."""
    for _ in range(2):
        reason = "allowed are 16777216; send less at once"
        each_way_raises(client, address_of(server), MessageError, reason, bytes(17_000_000))

    assert client.invoke(address_of(server), echo(), LONG_MS).code == 0


def test_opaques_count_over_all_connections_and_wrap_as_javas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next_opaque() + 1 == next_opaque()
    monkeypatch.setattr("mqtemplate.remoting.connection._opaques", iter([0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF]))

    assert [next_opaque() for _ in range(3)] == [2_147_483_647, -2_147_483_648, -1]


# --- no response ----------------------------------------------------------------------------------------


def test_the_error_of_a_timeout_states_that_the_request_may_have_been_carried_out(
    server: EchoServer, client: RemotingClient
) -> None:
    with pytest.raises(RemoteTimeoutError) as raised:
        client.invoke(address_of(server), RemotingCommand(HOLD), 50)

    assert str(raised.value) == (
        f"{server.address} did not answer request 9003 within 50ms; it may have been carried out all the same. "
        "Is the broker overloaded? Try again, or give it more time"
    )
    assert isinstance(raised.value, TimeoutError)


def test_a_late_response_is_ignored(server: EchoServer, client: RemotingClient) -> None:
    with pytest.raises(RemoteTimeoutError):
        client.invoke(address_of(server), RemotingCommand(HOLD), 1)
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response(body=b"too late"))

    assert client.invoke(address_of(server), echo(b"in time"), LONG_MS).body == b"in time"


def test_each_callback_is_called_once_when_timeouts_and_responses_race(
    server: EchoServer, client: RemotingClient
) -> None:
    """Some requests get their response at the moment of their timeout."""
    results: Results = queue.Queue()
    for number in range(200):
        client.invoke_async(address_of(server), RemotingCommand(HOLD), 1 + number % 7, results.put)
        connection, held = server.held.get(timeout=PATIENCE_S)
        connection.reply(held.response())

    first = [results.get(timeout=PATIENCE_S) for _ in range(200)]

    assert all(isinstance(result, RemotingCommand | RemoteTimeoutError) for result in first)
    assert client.invoke(address_of(server), echo(), LONG_MS).code == 0
    assert results.empty()


def test_the_error_of_a_refused_connection_names_what_to_check(client: RemotingClient) -> None:
    address = unused_address()
    results: Results = queue.Queue()

    with pytest.raises(RemoteConnectError) as raised:
        client.invoke(address, echo(), LONG_MS)
    client.invoke_async(address, echo(), LONG_MS, results.put)
    with pytest.raises(RemoteConnectError):
        client.invoke_one_way(address, echo())

    expected = (
        f"cannot connect to {address} (Connection refused); is a broker or name server running there, and is the "
        "address right?"
    )
    assert str(raised.value) == expected
    assert str(error_of(results)) == expected


def test_an_unknown_host_name_is_a_connect_error(client: RemotingClient) -> None:
    for host in ("no-such-host.invalid", "a..b"):
        with pytest.raises(RemoteConnectError, match=f"cannot connect to {host}:9876"):
            client.invoke(f"{host}:9876", echo(), LONG_MS)


def test_connecting_to_a_server_that_never_accepts_times_out(new_client: NewClient) -> None:
    client = new_client(RemotingClientSettings(connect_timeout_ms=50))
    reason = "cannot connect to .* within 50ms; is the address right"
    with full_backlog() as address, pytest.raises(RemoteConnectError, match=reason):
        client.invoke(address, echo(), LONG_MS)


def test_an_invalid_address_is_refused(client: RemotingClient) -> None:
    each_way_raises(client, "broker-a", ConfigurationError, "'broker-a' is not the address of a broker or name server")


# --- lost connections -----------------------------------------------------------------------------------


def test_a_lost_connection_fails_all_pending_requests_at_once(server: EchoServer, new_client: NewClient) -> None:
    results: Results = queue.Queue()
    closed: queue.Queue[str] = queue.Queue()
    client = new_client(on_close=closed.put)
    for _ in range(20):
        client.invoke_async(address_of(server), RemotingCommand(HOLD), 3_600_000, results.put)
    held = [server.held.get(timeout=PATIENCE_S) for _ in range(20)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.invoke, address_of(server), RemotingCommand(HOLD), 3_600_000)
        server.held.get(timeout=PATIENCE_S)
        held[0][0].close("away")

    errors = [error_of(results) for _ in range(20)]
    assert all(isinstance(error, RemoteConnectError) for error in errors)
    assert len(set(map(id, errors))) == 20, "each has an error of its own to raise"
    assert "was lost before the response arrived (closed); the request may have been carried out" in str(errors[0])
    assert isinstance(waiting.exception(PATIENCE_S), RemoteConnectError)
    assert closed.get(timeout=PATIENCE_S) == address_of(server)


def test_the_next_use_opens_a_new_connection(start_server: StartServer, new_client: NewClient) -> None:
    server = start_server()
    closed: queue.Queue[str] = queue.Queue()
    client = new_client(on_close=closed.put)
    assert client.invoke(address_of(server), echo(), LONG_MS).code == 0
    server.stop()
    assert closed.get(timeout=PATIENCE_S) == address_of(server)

    with pytest.raises(RemoteConnectError):
        client.invoke(address_of(server), echo(), LONG_MS)
    again = start_server(listen=server.address)

    assert client.invoke(address_of(again), echo(b"again"), LONG_MS).body == b"again"
    assert again.address == server.address


def test_many_threads_open_one_connection(server: EchoServer, client: RemotingClient) -> None:
    start = threading.Barrier(8)

    def ask(thread: int) -> None:
        start.wait(PATIENCE_S)
        client.invoke(address_of(server), echo(), LONG_MS)

    in_threads(8, ask)

    assert len(server.connections()) == 1
    assert server.closed.empty()


def test_the_client_closes_the_connection_to_a_server_that_sends_garbage(client: RemotingClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        results: Results = queue.Queue()
        client.invoke_async(f"127.0.0.1:{listener.getsockname()[1]}", echo(), LONG_MS, results.put)
        sock, _ = listener.accept()
        with sock, capture_logs():
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            error = error_of(results)

    assert isinstance(error, RemoteConnectError)
    assert "it is an HTTP response: this address is a web server's" in str(error)


def test_the_exception_of_a_close_callback_does_not_end_the_thread(server: EchoServer, new_client: NewClient) -> None:
    client = new_client(on_close=lambda address: 1 // 0)
    client.invoke(address_of(server), echo(), LONG_MS)

    with capture_logs() as logs:
        server.connections()[0].close("away")
        eventually(lambda: "remoting.callback_failed" in [entry["event"] for entry in logs], "the error is logged")

    assert client.invoke(address_of(server), echo(b"again"), LONG_MS).body == b"again"


# --- GO_AWAY --------------------------------------------------------------------------------------------


def test_a_request_refused_with_go_away_is_repeated_once_over_a_new_connection(
    server: EchoServer, client: RemotingClient
) -> None:
    results: Results = queue.Queue()

    refuse_with_go_away(server, 1)
    assert client.invoke(address_of(server), echo(b"sync"), LONG_MS).body == b"sync"
    refuse_with_go_away(server, 1)
    client.invoke_async(address_of(server), echo(b"async"), LONG_MS, results.put)

    assert response_of(results).body == b"async"
    assert len(server.connections()) == 3


def test_a_second_go_away_is_the_final_response(server: EchoServer, client: RemotingClient) -> None:
    results: Results = queue.Queue()
    refuse_with_go_away(server, 99)

    assert client.invoke(address_of(server), echo(), LONG_MS).code == ResponseCode.GO_AWAY
    client.invoke_async(address_of(server), echo(), LONG_MS, results.put)

    assert response_of(results).code == ResponseCode.GO_AWAY
    assert server.seen.empty()


def test_our_requests_have_a_version_that_understands_go_away(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(address_of(server), echo(), LONG_MS)

    assert server.seen.get().version > Version.V5_3_1


# --- close ----------------------------------------------------------------------------------------------


def test_closing_fails_all_pending_requests_and_ends_the_threads(server: EchoServer, new_client: NewClient) -> None:
    client = new_client()
    results: Results = queue.Queue()
    before = set(threading.enumerate())
    client.invoke_async(address_of(server), RemotingCommand(HOLD), 3_600_000, results.put)
    server.held.get(timeout=PATIENCE_S)

    client.close()
    client.close()

    assert "(the client is closed)" in str(error_of(results))
    assert server.closed.get(timeout=PATIENCE_S)
    assert set(threading.enumerate()) <= before


def test_a_closed_client_raises_an_error(server: EchoServer, new_client: NewClient) -> None:
    client = new_client()
    client.close()

    each_way_raises(client, address_of(server), BrokerClosedError, "this client is closed; create another one")


def test_a_callback_and_a_processor_may_close_the_client(server: EchoServer, new_client: NewClient) -> None:
    """`close` does not join the thread that calls it."""
    closed: queue.Queue[None] = queue.Queue()

    def close(client: RemotingClient) -> None:
        client.close()
        closed.put(None)

    first = new_client()
    first.invoke_async(address_of(server), echo(), LONG_MS, lambda _: close(first))
    closed.get(timeout=PATIENCE_S)
    second = new_client(on_request=lambda channel, request: close(second))
    second.invoke(address_of(server), echo(), LONG_MS)
    for connection in server.connections():
        connection.send_one_way(RemotingCommand(40))

    closed.get(timeout=PATIENCE_S)


def test_closing_fails_all_requests_that_wait_for_a_connection(new_client: NewClient) -> None:
    """There are more of them than threads that connect."""
    client = new_client(RemotingClientSettings(connect_timeout_ms=100))
    results: Results = queue.Queue()
    with full_backlog() as address:
        for _ in range(40):
            client.invoke_async(address, echo(), LONG_MS, results.put)

        client.close()

    assert all(isinstance(error_of(results), RemoteConnectError | BrokerClosedError) for _ in range(40))


def test_two_clients_of_one_process_share_nothing(start_server: StartServer, new_client: NewClient) -> None:
    """An application may use two clusters with two access keys."""
    server = start_server(RemotingServerSettings())
    first = new_client(RemotingClientSettings(credentials=Credentials(access_key="A1", secret_key="S1")))
    second = RemotingClient(RemotingClientSettings(), SystemClock())

    first.invoke(address_of(server), RemotingCommand(ECHO), LONG_MS)
    second.invoke(address_of(server), RemotingCommand(ECHO), LONG_MS)
    first.close()

    assert second.invoke(address_of(server), RemotingCommand(ECHO), LONG_MS).code == 0
    assert [server.seen.get().ext_fields.get("AccessKey") for _ in range(3)] == ["A1", None, None]
    second.close()
