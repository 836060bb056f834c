"""The client: an answer, an error with the reason, or a time-out; and never neither."""

from __future__ import annotations

import queue
import socket
import threading

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
from mqtemplate.remoting import Channel, Credentials, RemotingClient, RemotingClientSettings, RemotingServerSettings
from mqtemplate.remoting.outstanding import next_opaque
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode, Version
from mqtemplate.remoting.protocol.acl import is_signed_with
from tests.remoting.conftest import Connect, Serve
from tests.remoting.wire import BIG, ECHO, HOLD, NOBODY, PATIENCE_S, EchoServer, echo

LONG_MS = 60_000
Answers = queue.Queue[RemotingCommand | BrokerError]


def text(server: EchoServer) -> str:
    return str(server.address)


def dead_address() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def answer_of(answers: Answers) -> RemotingCommand:
    answer = answers.get(timeout=PATIENCE_S)
    assert isinstance(answer, RemotingCommand)
    return answer


def error_of(answers: Answers) -> BrokerError:
    error = answers.get(timeout=PATIENCE_S)
    assert isinstance(error, BrokerError)
    return error


# --- answers --------------------------------------------------------------------------------------------


def test_an_answer_comes_to_who_asked(server: EchoServer, client: RemotingClient) -> None:
    answer = client.invoke(text(server), echo(b"body", a="1"), LONG_MS)

    assert (answer.code, answer.body, answer.ext_fields) == (0, b"body", {"a": "1"})


def test_answers_of_many_threads_are_not_mixed_up(server: EchoServer, client: RemotingClient) -> None:
    wrong: list[bytes] = []

    def ask(thread: int) -> None:
        for number in range(100):
            body = b"%d:%d" % (thread, number)
            if client.invoke(text(server), echo(body), LONG_MS).body != body:
                wrong.append(body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert server.seen.qsize() == 800
    assert len(server.connections()) == 1, "one connection carries them all"


def test_answers_may_come_in_any_order(server: EchoServer, client: RemotingClient) -> None:
    answers: Answers = queue.Queue()
    client.invoke_async(text(server), RemotingCommand(HOLD, body=b"held"), LONG_MS, answers.put)
    client.invoke_async(text(server), echo(b"quick"), LONG_MS, answers.put)

    first = answer_of(answers)
    connection, held = server.held.get(timeout=PATIENCE_S)
    connection.reply(held.response(body=held.body))

    assert (first.body, answer_of(answers).body) == (b"quick", b"held")


def test_a_callback_may_ask_again(server: EchoServer, client: RemotingClient) -> None:
    """As a consumer does, which pulls again as soon as it has what it pulled."""
    answers: Answers = queue.Queue()

    def again(result: RemotingCommand | BrokerError) -> None:
        assert isinstance(result, RemotingCommand)
        left = int(result.body) - 1
        if left:
            client.invoke_async(text(server), echo(b"%d" % left), LONG_MS, again)
        else:
            answers.put(result)

    client.invoke_async(text(server), echo(b"50"), LONG_MS, again)

    assert answer_of(answers).body == b"1"


def test_a_callback_that_waits_for_itself_is_told_so(server: EchoServer, client: RemotingClient) -> None:
    told: queue.Queue[str] = queue.Queue()

    def wait_for_oneself(result: RemotingCommand | BrokerError) -> None:
        with pytest.raises(RuntimeError) as raised:
            client.invoke(text(server), echo(), LONG_MS)
        told.put(str(raised.value))

    client.invoke_async(text(server), echo(), LONG_MS, wait_for_oneself)

    assert told.get(timeout=PATIENCE_S).endswith("use invoke_async() there")


def test_a_callback_that_raises_is_logged_and_the_next_is_called(server: EchoServer, client: RemotingClient) -> None:
    answers: Answers = queue.Queue()

    with capture_logs() as logs:
        client.invoke_async(text(server), echo(), LONG_MS, lambda result: 1 // 0)
        client.invoke_async(text(server), echo(b"next"), LONG_MS, answers.put)
        assert answer_of(answers).body == b"next"

    assert "remoting.callback_failed" in [entry["event"] for entry in logs]


def test_a_one_way_request_is_marked_and_sent(server: EchoServer, client: RemotingClient) -> None:
    client.invoke_one_way(text(server), echo(b"by the way"))

    seen = server.seen.get(timeout=PATIENCE_S)
    assert (seen.is_one_way, seen.body) == (True, b"by the way")


def test_a_one_way_request_from_a_callback_does_not_block_it(serve: Serve, client: RemotingClient) -> None:
    asked, told = serve(), serve()

    client.invoke_async(text(asked), echo(), LONG_MS, lambda _: client.invoke_one_way(text(told), echo(b"by the way")))

    assert told.seen.get(timeout=PATIENCE_S).body == b"by the way"


def test_a_large_request_and_a_large_answer_arrive_whole(server: EchoServer, client: RemotingClient) -> None:
    body = bytes(range(256)) * 60_000

    assert client.invoke(text(server), echo(body), LONG_MS).body == body
    assert client.invoke(text(server), RemotingCommand(BIG, body=b"16000000"), LONG_MS).body == bytes(16_000_000)


def test_a_request_too_large_for_a_frame_is_refused_at_once(server: EchoServer, client: RemotingClient) -> None:
    """Whether the connection is there or not: nothing is left to wait for."""
    too_large = bytes(17_000_000)
    never: Answers = queue.Queue()

    for _ in range(2):
        with pytest.raises(MessageError, match="allowed are 16777216; send less at once"):
            client.invoke_async(text(server), echo(too_large), LONG_MS, never.put)
        with pytest.raises(MessageError):
            client.invoke(text(server), echo(too_large), LONG_MS)
        with pytest.raises(MessageError):
            client.invoke_one_way(text(server), echo(too_large))

    assert client.invoke(text(server), echo(), LONG_MS).code == 0
    assert never.empty()


def test_opaques_count_over_all_connections_and_wrap_as_java_s_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next_opaque() + 1 == next_opaque()
    monkeypatch.setattr("mqtemplate.remoting.outstanding._counter", iter([0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF]))

    assert [next_opaque() for _ in range(3)] == [2_147_483_647, -2_147_483_648, -1]


# --- no answer ------------------------------------------------------------------------------------------


def test_no_answer_in_time_is_an_error_that_says_what_may_have_happened(
    server: EchoServer, client: RemotingClient
) -> None:
    with pytest.raises(RemoteTimeoutError) as raised:
        client.invoke(text(server), RemotingCommand(HOLD), 50)

    assert str(raised.value) == (
        f"{server.address} did not answer request 9003 within 50 ms; it may have been carried out all the same. "
        "Is the broker overloaded? Try again, or give it more time"
    )
    assert isinstance(raised.value, TimeoutError)


def test_an_answer_that_comes_too_late_is_dropped(server: EchoServer, client: RemotingClient) -> None:
    with pytest.raises(RemoteTimeoutError):
        client.invoke(text(server), RemotingCommand(HOLD), 1)
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response(body=b"too late"))

    assert client.invoke(text(server), echo(b"in time"), LONG_MS).body == b"in time"


def test_each_of_many_time_outs_is_told_once(server: EchoServer, client: RemotingClient) -> None:
    """Some are answered at the moment that they time out."""
    answers: Answers = queue.Queue()
    for number in range(200):
        client.invoke_async(text(server), RemotingCommand(HOLD), 1 + number % 7, answers.put)
        connection, held = server.held.get(timeout=PATIENCE_S)
        connection.reply(held.response())

    results = [answers.get(timeout=PATIENCE_S) for _ in range(200)]

    assert all(isinstance(result, RemotingCommand | RemoteTimeoutError) for result in results)
    assert client.invoke(text(server), echo(), LONG_MS).code == 0
    assert answers.empty()


def test_where_nobody_listens_the_error_says_what_to_look_at(client: RemotingClient) -> None:
    address = dead_address()
    answers: Answers = queue.Queue()

    with pytest.raises(RemoteConnectError) as raised:
        client.invoke(address, echo(), LONG_MS)
    client.invoke_async(address, echo(), LONG_MS, answers.put)
    with pytest.raises(RemoteConnectError):
        client.invoke_one_way(address, echo())

    expected = (
        f"cannot connect to {address} (Connection refused); is a broker or name server running there, and is the "
        "address right?"
    )
    assert str(raised.value) == expected
    assert str(error_of(answers)) == expected


def test_a_host_that_has_no_address_is_an_error_of_the_connection(client: RemotingClient) -> None:
    for host in ("no-such-host.invalid", "a..b"):
        with pytest.raises(RemoteConnectError, match=f"cannot connect to {host}:9876"):
            client.invoke(f"{host}:9876", echo(), LONG_MS)


def test_a_server_that_never_accepts_is_given_up_in_time(connect: Connect) -> None:
    """Its backlog is full: the system answers nobody."""
    client = connect(RemotingClientSettings(connect_timeout_ms=50))
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)

        with pytest.raises(RemoteConnectError, match="cannot connect to .* within 50 ms; is the address right"):
            client.invoke(f"127.0.0.1:{address[1]}", echo(), LONG_MS)
        for sock in waiting:
            sock.close()


def test_what_is_no_address_is_refused(client: RemotingClient) -> None:
    never: Answers = queue.Queue()
    for call in (
        lambda: client.invoke("broker-a", echo(), LONG_MS),
        lambda: client.invoke_async("broker-a", echo(), LONG_MS, never.put),
        lambda: client.invoke_one_way("broker-a", echo()),
    ):
        with pytest.raises(ConfigurationError, match="'broker-a' is not the address of a broker or name server"):
            call()


# --- lost connections -----------------------------------------------------------------------------------


def test_a_lost_connection_fails_what_is_outstanding_at_once(server: EchoServer, client: RemotingClient) -> None:
    answers: Answers = queue.Queue()
    closed: queue.Queue[str] = queue.Queue()
    client.on_close(closed.put)
    for _ in range(20):
        client.invoke_async(text(server), RemotingCommand(HOLD), 3_600_000, answers.put)
    held = [server.held.get(timeout=PATIENCE_S) for _ in range(20)]
    waiting: queue.Queue[BaseException] = queue.Queue()

    def ask() -> None:
        try:
            client.invoke(text(server), RemotingCommand(HOLD), 3_600_000)
        except RemoteConnectError as exc:
            waiting.put(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    server.held.get(timeout=PATIENCE_S)
    held[0][0].close("away")

    errors = [error_of(answers) for _ in range(20)]
    assert all(isinstance(error, RemoteConnectError) for error in errors)
    assert len(set(map(id, errors))) == 20, "each has an error of its own to raise"
    assert "was lost before the answer came (closed); what was asked may have been carried out" in str(errors[0])
    assert isinstance(waiting.get(timeout=PATIENCE_S), RemoteConnectError)
    thread.join()
    assert closed.get(timeout=PATIENCE_S) == text(server)


def test_the_next_use_makes_a_new_connection(serve: Serve, client: RemotingClient) -> None:
    server = serve()
    closed: queue.Queue[str] = queue.Queue()
    client.on_close(closed.put)
    assert client.invoke(text(server), echo(), LONG_MS).code == 0
    server.stop()
    assert closed.get(timeout=PATIENCE_S) == text(server)

    with pytest.raises(RemoteConnectError):
        client.invoke(text(server), echo(), LONG_MS)
    again = serve(listen=server.address)

    assert client.invoke(text(again), echo(b"again"), LONG_MS).body == b"again"
    assert again.address == server.address


def test_many_threads_make_one_connection(server: EchoServer, client: RemotingClient) -> None:
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(PATIENCE_S)
        client.invoke(text(server), echo(), LONG_MS)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(server.connections()) == 1
    assert server.closed.empty()


def test_a_server_that_sends_garbage_is_left(client: RemotingClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers: Answers = queue.Queue()
        client.invoke_async(f"127.0.0.1:{listener.getsockname()[1]}", echo(), LONG_MS, answers.put)
        sock, _ = listener.accept()
        with sock, capture_logs():
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            error = error_of(answers)

    assert isinstance(error, RemoteConnectError)
    assert "it is an HTTP response: this address is a web server's" in str(error)


def test_a_callback_of_an_end_that_raises_does_not_hide_it_from_the_next(
    server: EchoServer, client: RemotingClient
) -> None:
    closed: queue.Queue[str] = queue.Queue()
    client.on_close(lambda address: 1 // 0)
    client.on_close(closed.put)
    client.invoke(text(server), echo(), LONG_MS)

    with capture_logs() as logs:
        server.connections()[0].close("away")
        assert closed.get(timeout=PATIENCE_S) == text(server)

    assert "remoting.callback_failed" in [entry["event"] for entry in logs]


# --- GO_AWAY --------------------------------------------------------------------------------------------


def leaving(server: EchoServer, times: int) -> None:
    """Let *server* refuse so many requests as one that is shutting down does."""
    left = iter(range(times))
    server.guard = lambda connection, request: (
        request.response(ResponseCode.GO_AWAY) if next(left, None) is not None else None
    )


def test_a_request_that_was_refused_with_go_away_is_repeated_once_over_a_new_connection(
    server: EchoServer, client: RemotingClient
) -> None:
    answers: Answers = queue.Queue()

    leaving(server, 1)
    assert client.invoke(text(server), echo(b"sync"), LONG_MS).body == b"sync"
    leaving(server, 1)
    client.invoke_async(text(server), echo(b"async"), LONG_MS, answers.put)

    assert answer_of(answers).body == b"async"
    assert len(server.connections()) == 3


def test_a_server_that_goes_on_refusing_is_believed(server: EchoServer, client: RemotingClient) -> None:
    answers: Answers = queue.Queue()
    leaving(server, 99)

    assert client.invoke(text(server), echo(), LONG_MS).code == ResponseCode.GO_AWAY
    client.invoke_async(text(server), echo(), LONG_MS, answers.put)

    assert answer_of(answers).code == ResponseCode.GO_AWAY
    assert server.seen.empty()


def test_our_requests_say_a_version_that_may_be_told_to_go_away(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(text(server), echo(), LONG_MS)

    assert server.seen.get().version > Version.V5_3_1


# --- requests of brokers --------------------------------------------------------------------------------


def test_a_broker_may_ask_and_its_question_may_take_time(server: EchoServer, connect: Connect) -> None:
    """It is answered in a worker, which may even ask the broker meanwhile."""

    def on_request(channel: Channel, request: RemotingCommand) -> RemotingCommand:
        inner = client.invoke(text(server), echo(b"meanwhile"), LONG_MS)
        return request.response(body=request.body + b"; " + inner.body)

    client = connect(on_request=on_request)
    client.invoke(text(server), echo(), LONG_MS)
    answers: Answers = queue.Queue()

    server.connections()[0].request(RemotingCommand(39, body=b"state?"), LONG_MS, answers.put)

    assert answer_of(answers).body == b"state?; meanwhile"


def test_a_question_may_be_answered_later_or_by_another_request(server: EchoServer, connect: Connect) -> None:
    """A check of a transaction is one-way, and answered by END_TRANSACTION on the same connection."""
    asked: queue.Queue[tuple[Channel, RemotingCommand]] = queue.Queue()
    client = connect(on_request=lambda channel, request: asked.put((channel, request)))
    client.invoke(text(server), echo(), LONG_MS)
    server.seen.get()
    answers: Answers = queue.Queue()
    server.connections()[0].request(RemotingCommand(39), LONG_MS, answers.put)
    channel, request = asked.get(timeout=PATIENCE_S)

    channel.send_one_way(echo(b"committed"))
    channel.reply(request.response(remark="later"))

    assert answer_of(answers).remark == "later"
    assert server.seen.get(timeout=PATIENCE_S).body == b"committed"


def test_a_question_nobody_takes_is_answered_so(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(text(server), echo(), LONG_MS)
    answers: Answers = queue.Queue()
    (connection,) = server.connections()

    connection.send_one_way(RemotingCommand(NOBODY))
    connection.request(RemotingCommand(220), LONG_MS, answers.put)

    answer = answer_of(answers)
    assert (answer.code, answer.remark) == (3, "request code 220 RESET_CONSUMER_CLIENT_OFFSET is not supported here")


def test_a_question_whose_handler_raises_is_answered_with_the_error(server: EchoServer, connect: Connect) -> None:
    def on_request(channel: Channel, request: RemotingCommand) -> RemotingCommand:
        raise ValueError("no such group")

    client = connect(on_request=on_request)
    client.invoke(text(server), echo(), LONG_MS)
    answers: Answers = queue.Queue()

    with capture_logs() as logs:
        server.connections()[0].request(RemotingCommand(307), LONG_MS, answers.put)
        answer = answer_of(answers)

    assert (answer.code, answer.remark) == (1, "ValueError: no such group")
    assert "remoting.request_failed" in [entry["event"] for entry in logs]


# --- signatures -----------------------------------------------------------------------------------------


def test_every_request_is_signed_as_it_travels(server: EchoServer, connect: Connect) -> None:
    """One-way ones too, and those that answer a question on the connection it came by."""
    credentials = Credentials(access_key="AK", secret_key="SK12345", security_token="lent")
    channels: queue.Queue[Channel] = queue.Queue()
    client = connect(
        RemotingClientSettings(credentials=credentials), on_request=lambda channel, request: channels.put(channel)
    )
    answers: Answers = queue.Queue()

    client.invoke(text(server), echo(b"B", topic="T1"), LONG_MS)
    client.invoke_async(text(server), echo(b"B", topic="T1"), LONG_MS, answers.put)
    answer_of(answers)
    client.invoke_one_way(text(server), echo(b"B", topic="T1"))
    server.connections()[0].send_one_way(RemotingCommand(39))
    channels.get(timeout=PATIENCE_S).send_one_way(echo(b"B", topic="T1"))

    for _ in range(4):
        seen = server.seen.get(timeout=PATIENCE_S)
        assert is_signed_with(seen, "SK12345")
        assert not is_signed_with(seen, "SK12346")
        assert (seen.ext_fields["AccessKey"], seen.ext_fields["SecurityToken"]) == ("AK", "lent")


def test_a_repeated_request_is_signed_again(server: EchoServer, connect: Connect) -> None:
    client = connect(RemotingClientSettings(credentials=Credentials(access_key="AK", secret_key="SK")))
    leaving(server, 1)

    client.invoke(text(server), echo(b"B", topic="T1"), LONG_MS)

    assert is_signed_with(server.seen.get(timeout=PATIENCE_S), "SK")


def test_without_credentials_nothing_is_added(server: EchoServer, client: RemotingClient) -> None:
    client.invoke(text(server), echo(topic="T1"), LONG_MS)

    assert server.seen.get().ext_fields == {"topic": "T1"}


def test_secrets_are_not_shown() -> None:
    shown = repr(
        RemotingClientSettings(credentials=Credentials(access_key="AK", secret_key="S3", security_token="T0K"))
    )

    assert "AK" in shown
    assert "S3" not in shown
    assert "T0K" not in shown


# --- the end --------------------------------------------------------------------------------------------


def test_closing_fails_what_is_outstanding_and_ends_the_threads(server: EchoServer, connect: Connect) -> None:
    client = connect()
    answers: Answers = queue.Queue()
    before = set(threading.enumerate())
    client.invoke_async(text(server), RemotingCommand(HOLD), 3_600_000, answers.put)
    server.held.get(timeout=PATIENCE_S)

    client.close()
    client.close()

    assert "(the client is closed)" in str(error_of(answers))
    assert server.closed.get(timeout=PATIENCE_S)
    assert set(threading.enumerate()) <= before


def test_a_closed_client_says_so(server: EchoServer, connect: Connect) -> None:
    client = connect()
    client.close()

    for call in (
        lambda: client.invoke(text(server), echo(), LONG_MS),
        lambda: client.invoke_async(text(server), echo(), LONG_MS, print),
        lambda: client.invoke_one_way(text(server), echo()),
    ):
        with pytest.raises(BrokerClosedError, match="this client is closed; make another one"):
            call()


def test_a_client_may_be_closed_by_a_callback_and_by_a_question(server: EchoServer, connect: Connect) -> None:
    """Neither waits for itself."""
    closed: queue.Queue[None] = queue.Queue()

    def close(client: RemotingClient) -> None:
        client.close()
        closed.put(None)

    first = connect()
    first.invoke_async(text(server), echo(), LONG_MS, lambda _: close(first))
    closed.get(timeout=PATIENCE_S)
    second = connect(on_request=lambda channel, request: close(second))
    second.invoke(text(server), echo(), LONG_MS)
    for connection in server.connections():
        connection.send_one_way(RemotingCommand(40))

    closed.get(timeout=PATIENCE_S)


def test_requests_that_wait_for_a_connection_are_told_when_the_client_closes(connect: Connect) -> None:
    """More of them than there are threads to dial: none is forgotten."""
    client = connect(RemotingClientSettings(connect_timeout_ms=100))
    answers: Answers = queue.Queue()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = f"127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        for _ in range(40):
            client.invoke_async(address, echo(), LONG_MS, answers.put)

        client.close()
        for sock in waiting:
            sock.close()

    assert all(isinstance(error_of(answers), RemoteConnectError | BrokerClosedError) for _ in range(40))


def test_two_clients_of_one_process_share_nothing(serve: Serve, connect: Connect) -> None:
    """Two clusters, two identities."""
    server = serve(RemotingServerSettings())
    first = connect(RemotingClientSettings(credentials=Credentials(access_key="A1", secret_key="S1")))
    second = RemotingClient(RemotingClientSettings(), SystemClock())

    first.invoke(text(server), RemotingCommand(ECHO), LONG_MS)
    second.invoke(text(server), RemotingCommand(ECHO), LONG_MS)
    first.close()

    assert second.invoke(text(server), RemotingCommand(ECHO), LONG_MS).code == 0
    assert [server.seen.get().ext_fields.get("AccessKey") for _ in range(3)] == ["A1", None, None]
    second.close()
