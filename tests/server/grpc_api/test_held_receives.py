"""Receives whose client leaves, or cannot take the messages; and those that wait, as tools count them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import InFlightMessage
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.http2 import frames
from mqtemplate.http2.frames import ErrorCode, frame, rst_stream_frame, window_update_frame
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.headers.pop import PollingInfoRequestHeader, PollingInfoResponseHeader
from mqtemplate.server import Account, AclSettings, BrokerServer, Right
from mqtemplate.server.grpc_api import consuming
from mqtemplate.server.grpc_api.clients import GrpcClient
from tests.http2.wire import SocketPeer, call, changed, data, headers, messages
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    Received,
    advance,
    consumer_settings,
    create_topic,
    endpoint,
    message,
    serving,
)
from tests.server.grpc_api.test_clients import SECRET
from tests.server.grpc_api.test_consuming import GROUP, TOPIC, assignment, held, in_thread
from tests.server.tool import Tool
from tests.waiting import eventually

Server = BrokerServer[EmbeddedBroker]
OpenPeer = Callable[..., SocketPeer]
CLIENT = {"x_mq_client_id": "client-2", "x_mq_client_version": "5.2.0"}
EMPTY = ["status", "delivery_timestamp"]


@pytest.fixture
def topic(server: Server) -> str:
    create_topic(server, TOPIC)
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    return TOPIC


@pytest.fixture
def other(server: Server, topic: str, open_peer: OpenPeer) -> Iterator[GrpcTool]:
    """A client that has reported its settings, and whose receive waits for 20 seconds."""
    with GrpcTool(server, "client-2") as other:
        yield other


@pytest.fixture
def open_peer(server: Server) -> Iterator[OpenPeer]:
    """Connect a raw client; takes the settings of its side of HTTP/2."""
    with ExitStack() as closing:

        def connect(**options: dict[int, int]) -> SocketPeer:
            peer = SocketPeer(endpoint(server).server.address, **options)  # type: ignore[arg-type]
            closing.callback(peer.socket.close)
            return peer

        yield connect


def receive_call(stream_id: int = 1, *, wait_s: int = 20, count: int = 32, auto_renew: bool = False) -> bytes:
    """Return the frames of a receive."""
    request = protos.ReceiveMessageRequest(batch_size=count, auto_renew=auto_renew)
    request.group.name, request.message_queue.topic.name = GROUP, TOPIC
    request.invisible_duration.seconds, request.long_polling_timeout.seconds = 600, wait_s
    return call(stream_id, protos.method_path("ReceiveMessage"), request.SerializeToString(), **CLIENT)


def wait_for_receives(server: Server, count: int) -> None:
    eventually(lambda: held(server) == count, f"{count} receives wait")


# --- clients that leave ---------------------------------------------------------------------------


def terminates(other: GrpcTool, stream: object) -> None:
    assert other.terminate(GROUP).status.code == Code.OK


def ends_telemetry(other: GrpcTool, stream: object) -> None:
    stream.end()  # type: ignore[attr-defined]


def cancels_telemetry(other: GrpcTool, stream: object) -> None:
    stream.cancel()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", [terminates, ends_telemetry, cancels_telemetry])
@pytest.mark.parametrize("kind", [ClientType.SIMPLE_CONSUMER, ClientType.PUSH_CONSUMER])
def test_the_receives_of_a_client_that_leaves_end_at_once(
    server: Server, other: GrpcTool, kind: ClientType, leave: Callable[[GrpcTool, object], None]
) -> None:
    """RocketMQ's client for Java closes its connection after the end of the last call, however long that takes."""
    stream = other.telemetry()
    stream.report(consumer_settings(GROUP, TOPIC, kind=kind))
    threads = [in_thread(other.start_receive(GROUP, TOPIC, wait_s=20)) for _ in range(2)]
    wait_for_receives(server, 2)

    leave(other, stream)

    for thread, found in threads:
        thread.join()
        assert (found[0].code, found[0].kinds) == (Code.MESSAGE_NOT_FOUND, EMPTY)
    assert held(server) == 0


def test_the_receives_of_a_push_consumer_that_queries_its_assignment_no_more_end(
    stepped: Server, stepped_tool: GrpcTool
) -> None:
    """RocketMQ's clients query it every 5 seconds. One that closes waits for its receives before it terminates."""
    create_topic(stepped, TOPIC)
    stepped.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    stream = stepped_tool.telemetry()
    stream.report(consumer_settings(GROUP, TOPIC, kind=ClientType.PUSH_CONSUMER))
    thread, found = in_thread(stepped_tool.start_receive(GROUP, TOPIC, wait_s=20, timeout=600))
    wait_for_receives(stepped, 1)
    for _ in range(3):
        assert assignment(stepped_tool).status.code == Code.OK
        advance(stepped, 5_000)
    assert held(stepped) == 1

    advance(stepped, 1_000)

    thread.join()
    assert found[0].code is Code.MESSAGE_NOT_FOUND


def test_many_receives_of_a_client_that_leaves_end_a_few_at_a_time(
    server: Server, topic: str, open_peer: OpenPeer
) -> None:
    """The other clients are served in between."""
    peer = open_peer()
    peer.send(*(receive_call(number) for number in range(1, 401, 2)))
    wait_for_receives(server, 200)

    peer.send(frame(frames.GOAWAY, 0, 0, bytes(8)))

    assert [peer.response()[0]["grpc-status"] for _ in range(200)] == ["0"] * 200
    assert held(server) == 0


def test_the_receives_of_the_other_clients_wait_on(server: Server, tool: GrpcTool, other: GrpcTool) -> None:
    stream = other.telemetry()
    stream.report(consumer_settings(GROUP, TOPIC))
    own, ended = (in_thread(each.start_receive(GROUP, TOPIC, wait_s=20)) for each in (tool, other))
    wait_for_receives(server, 2)
    other.terminate(GROUP)
    ended[0].join()

    tool.send(message(TOPIC))

    own[0].join()
    assert own[1][0].bodies == [b"body"]


def test_a_client_whose_stream_is_replaced_has_not_left(server: Server, tool: GrpcTool, other: GrpcTool) -> None:
    """The stream breaks, and the client has opened another one before the server knows."""
    older, newer = other.telemetry(), other.telemetry()
    older.report(consumer_settings(GROUP, TOPIC))
    thread, found = in_thread(other.start_receive(GROUP, TOPIC, wait_s=20))
    wait_for_receives(server, 1)
    newer.report(consumer_settings(GROUP, TOPIC))
    with pytest.raises(StopIteration):
        older.next()

    tool.send(message(TOPIC))

    thread.join()
    assert found[0].bodies == [b"body"]


def test_receives_end_when_the_client_announces_that_it_closes_the_connection(
    server: Server, topic: str, open_peer: OpenPeer
) -> None:
    peer = open_peer()
    peer.send(receive_call())
    wait_for_receives(server, 1)

    peer.send(frame(frames.GOAWAY, 0, 0, bytes(8)))

    assert Received([protos.ReceiveMessageResponse.FromString(each) for each in peer.response()[1]]).kinds == EMPTY
    assert held(server) == 0


def test_receives_end_when_the_connection_is_lost(server: Server, topic: str, open_peer: OpenPeer) -> None:
    peer = open_peer()
    peer.send(receive_call(1), receive_call(3))
    wait_for_receives(server, 2)

    peer.socket.close()

    wait_for_receives(server, 0)


def test_the_receives_of_a_client_end_when_the_connection_of_its_telemetry_is_lost(
    server: Server, other: GrpcTool, open_peer: OpenPeer
) -> None:
    """A client may use several connections."""
    settings = protos.TelemetryCommand(settings=consumer_settings(GROUP, TOPIC)).SerializeToString()
    client_id = ("x-mq-client-id", "client-2")
    fields = ((":path", protos.method_path("Telemetry")), *changed(client_id, without=":path"))
    peer = open_peer()
    peer.send(headers(1, fields, frames.END_HEADERS), data(1, b"\0" + len(settings).to_bytes(4, "big") + settings, 0))
    peer.until(frames.DATA)
    thread, found = in_thread(other.start_receive(GROUP, TOPIC, wait_s=20))
    wait_for_receives(server, 1)

    peer.socket.close()

    thread.join()
    assert found[0].code is Code.MESSAGE_NOT_FOUND


def test_the_receives_of_an_account_whose_rights_changed_end() -> None:
    """The next one is checked again."""
    account = Account(
        access_key="the-consumer", secret_key=SECRET, topic_perms={TOPIC: Right.SUB}, group_perms={GROUP: Right.SUB}
    )
    with serving(acl=AclSettings(accounts=(account,))) as server:
        create_topic(server, TOPIC)
        with GrpcTool(server, keys=("the-consumer", SECRET)) as tool:
            thread, found = in_thread(tool.start_receive(GROUP, TOPIC, wait_s=20))
            wait_for_receives(server, 1)

            server.use_accounts(AclSettings(accounts=(replace(account, group_perms={}),)))

            thread.join()
            assert found[0].code is Code.MESSAGE_NOT_FOUND
            assert tool.receive(GROUP, TOPIC).code is Code.UNAUTHORIZED


def test_a_receive_that_begins_while_the_server_stops_does_not_wait(
    stepped: Server, stepped_tool: GrpcTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop has answered the others already. It waited for this one, as long as it waits for clients."""
    create_topic(stepped, TOPIC)
    stepped.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    receives = endpoint(stepped).service.consuming
    began = receives.began

    def began_after_the_stop(*arguments: Any) -> None:
        receives.close()
        began(*arguments)

    monkeypatch.setattr(receives, "began", began_after_the_stop)
    thread, found = in_thread(stepped_tool.start_receive(GROUP, TOPIC, wait_s=20, timeout=600))

    eventually(lambda: not thread.is_alive(), "the receive has ended")
    assert (found[0].code, found[0].kinds) == (Code.MESSAGE_NOT_FOUND, EMPTY)
    assert held(stepped) == 0


def test_the_stream_of_a_client_that_ends_before_it_is_attached_ends(
    server: Server, other: GrpcTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client expires just when it reports its settings again. It knows that only from the end of its stream."""
    attach = GrpcClient.attach

    def attach_after_the_end(client: GrpcClient, *arguments: Any) -> GrpcCall | None:
        client.close("no heartbeat")
        return attach(client, *arguments)

    monkeypatch.setattr(GrpcClient, "attach", attach_after_the_end)
    stream = other.telemetry()
    stream.report(consumer_settings(GROUP, TOPIC))

    eventually(lambda: not endpoint(server).server.connections()[-1].open_calls, "the stream has ended")
    with pytest.raises(StopIteration):
        stream.next()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_stream_that_the_server_ends_takes_no_memory(server: Server, other: GrpcTool, is_replaced: bool) -> None:
    """Each client that left and each stream that was opened again left one, with its connection."""
    service, stream = endpoint(server).service, other.telemetry()
    stream.report(consumer_settings(GROUP, TOPIC))
    assert len(service._streams) == 1

    newer = other.telemetry()
    if is_replaced:
        newer.report(consumer_settings(GROUP, TOPIC))
    else:
        other.terminate(GROUP)
        newer.cancel()

    eventually(lambda: len(service._streams) == is_replaced, "the server has forgotten the stream")


# --- messages that do not arrive ------------------------------------------------------------------


def resets(peer: SocketPeer) -> None:
    peer.send(rst_stream_frame(1, ErrorCode.CANCEL))


def disconnects(peer: SocketPeer) -> None:
    peer.socket.close()


@pytest.mark.parametrize("leave", [resets, disconnects])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_messages_that_the_windows_of_a_client_hold_back_are_visible_when_it_is_gone(
    server: Server,
    tool: GrpcTool,
    topic: str,
    open_peer: OpenPeer,
    leave: Callable[[SocketPeer], None],
    is_ordered: bool,
) -> None:
    """The receive is answered, but no byte of the messages has left. It was no attempt to deliver them."""
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP, consume_message_orderly=is_ordered)])
    tool.send(*(message(topic, b"%d" % number, f"id-{number}") for number in range(3)))
    peer = open_peer(settings={frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(receive_call())
    peer.until(frames.HEADERS)

    leave(peer)

    again: list[bytes] = []
    while len(again) < 3:
        received = tool.receive(GROUP, topic, wait_s=20)
        again += received.bodies
        assert {each.system_properties.delivery_attempt for each in received.messages} == {1}
        tool.ack(GROUP, topic, *(each.system_properties.receipt_handle for each in received.messages))
    assert sorted(again) == [b"0", b"1", b"2"]


def test_messages_that_were_sent_remain_invisible(
    server: Server, tool: GrpcTool, topic: str, open_peer: OpenPeer
) -> None:
    """The client has permitted the status, one message, and a part of the next one."""
    tool.send(*(message(topic, b"x" * 1_000, f"id-{number}") for number in range(3)))
    peer = open_peer(settings={frames.INITIAL_WINDOW_SIZE: 0})
    peer.send(receive_call())
    peer.until(frames.HEADERS)
    peer.send(window_update_frame(1, 2_000))
    content = b""
    while len(content) < 2_000:
        content += peer.until(frames.DATA).payload

    resets(peer)

    first = protos.ReceiveMessageResponse.FromString(messages(content)[1]).message.system_properties.message_id
    ids: set[str] = set()
    while len(ids) < 2:
        ids |= {each.system_properties.message_id for each in tool.receive(GROUP, topic, wait_s=20).messages}
    assert ids == {"id-0", "id-1", "id-2"} - {first}


# --- renewed messages ------------------------------------------------------------------------------


@pytest.fixture
def renewed(stepped: Server, stepped_tool: GrpcTool) -> Iterator[SocketPeer]:
    """A raw client that the server has sent a message, which it renews for the client. The socket has accepted it."""
    with renewed_by(stepped, stepped_tool) as peer:
        yield peer


@contextmanager
def renewed_by(server: Server, producer: GrpcTool) -> Iterator[SocketPeer]:
    create_topic(server, TOPIC)
    server.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    producer.send(message(TOPIC))
    peer = SocketPeer(endpoint(server).server.address)
    with closing(peer.socket):
        peer.send(receive_call(auto_renew=True))
        assert len(peer.response()[1]) == 3
        yield peer


def deliveries(server: Server) -> list[InFlightMessage]:
    found = server.engine.engine.pop.deliveries(GROUP)
    return [] if found is None else list(found.messages)


def test_a_message_is_renewed_from_the_moment_on_at_which_its_client_has_read_the_response(
    stepped: Server, renewed: SocketPeer
) -> None:
    """A client responds to a PING after all that it has read before."""
    [before] = deliveries(stepped)
    advance(stepped, 1_000)
    ping = renewed.until(frames.PING)
    [meanwhile] = deliveries(stepped)

    renewed.send(frame(frames.PING, frames.ACK, 0, ping.payload))

    eventually(lambda: deliveries(stepped)[0].is_renewed, "the message is renewed")
    [after] = deliveries(stepped)
    assert not before.is_renewed
    assert meanwhile == before
    assert [each.until_ms - each.since_ms for each in (before, after)] == [60_000, 3 * 3_600_000]


def test_a_message_is_not_renewed_for_a_client_that_resets_the_call_after_its_end(
    stepped: Server, renewed: SocketPeer
) -> None:
    """Its deadline has passed before it has read the response, which it drops. The connection is used on."""
    resets(renewed)
    advance(stepped, 1_000)
    ping = renewed.until(frames.PING)

    renewed.send(frame(frames.PING, frames.ACK, 0, ping.payload), frame(frames.PING, 0, 0, bytes(8)))

    assert renewed.until(frames.PING).flags & frames.ACK  # the frames before it are processed
    assert [each.is_renewed for each in deliveries(stepped)] == [False]


def remains_silent(peer: SocketPeer) -> None:
    """The client lives, as its telemetry and heartbeats on another connection tell; but this one is broken."""


@pytest.mark.parametrize("leave", [remains_silent, disconnects])
def test_a_message_whose_response_may_be_lost_comes_again_after_a_minute(
    stepped: Server, stepped_tool: GrpcTool, renewed: SocketPeer, leave: Callable[[SocketPeer], None]
) -> None:
    with GrpcTool(stepped, "client-2") as same:
        stream = same.telemetry()
        stream.report(consumer_settings(GROUP, TOPIC, kind=ClientType.PUSH_CONSUMER))
        leave(renewed)
        for _ in range(5):
            advance(stepped, 10_000)
            assert same.heartbeat(GROUP).status.code == Code.OK
        advance(stepped, 9_000)
        assert len(deliveries(stepped)) == 1
        advance(stepped, 1_000)

        [again] = same.receive(GROUP, TOPIC, auto_renew=True, timeout=600).messages
        assert again.system_properties.delivery_attempt == 2


def test_a_message_that_was_popped_while_its_client_ended_is_not_renewed(
    stepped: Server, stepped_tool: GrpcTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receives end a moment later. Nothing would end the renewal: the message was invisible for three hours."""
    create_topic(stepped, TOPIC)
    stepped.groups.put([SubscriptionGroupConfig(group_name=GROUP)])
    clients = endpoint(stepped).service.clients
    monkeypatch.setattr(clients, "_leaving", lambda client_id: None)
    peer = SocketPeer(endpoint(stepped).server.address)
    with closing(peer.socket):
        peer.send(receive_call(auto_renew=True))
        wait_for_receives(stepped, 1)
        clients.end(clients._clients["client-2"])
        stepped_tool.send(message(TOPIC))
        advance(stepped, 0)
        assert len(peer.response()[1]) == 3

        advance(stepped, 2_000)
        peer.send(frame(frames.PING, 0, 0, bytes(8)))

        assert peer.until(frames.PING).flags & frames.ACK
        assert [each.is_renewed for each in deliveries(stepped)] == [False]


def test_a_message_that_was_acknowledged_needs_no_ping(stepped: Server, stepped_tool: GrpcTool) -> None:
    with renewed_by(stepped, stepped_tool) as peer:
        [delivery] = deliveries(stepped)
        stepped.engine.engine.pop.reset(GROUP, delivery.queue, 1)
        advance(stepped, 2_000)

        peer.send(frame(frames.PING, 0, 0, bytes(8)))

        assert peer.until(frames.PING).flags & frames.ACK


def test_a_kill_right_after_the_response_does_not_hide_a_message_for_hours(tmp_path: Path) -> None:
    """The next run does not know if the client has it. The client is here again, but waits for another response."""
    clock = VirtualClock()
    with (
        serving(EmbeddedBroker(tmp_path / "store", clock=clock)) as server,
        GrpcTool(server, "producer") as producer,
        renewed_by(server, producer),
    ):
        shutil.copytree(tmp_path / "store", tmp_path / "killed")  # as a kill leaves the files

    with serving(EmbeddedBroker(tmp_path / "killed", clock=clock)) as server, GrpcTool(server, "client-2") as same:
        stream = same.telemetry()
        stream.report(consumer_settings(GROUP, TOPIC, kind=ClientType.PUSH_CONSUMER))
        for _ in range(6):
            assert same.heartbeat(GROUP).status.code == Code.OK
            advance(server, 10_000)

        [again] = same.receive(GROUP, TOPIC, auto_renew=True, timeout=600).messages
        assert again.system_properties.delivery_attempt == 2


# --- clients that do not read ---------------------------------------------------------------------


@pytest.fixture
def shut_peer(monkeypatch: pytest.MonkeyPatch, open_peer: OpenPeer) -> SocketPeer:
    """A client that permits no byte of a response. More than 1,000 unread bytes are too many."""
    monkeypatch.setattr(consuming, "_MAX_UNREAD_BYTES", 1_000)
    return open_peer(settings={frames.INITIAL_WINDOW_SIZE: 0})


def wait_for_unread(server: Server) -> None:
    grpc = endpoint(server).server
    eventually(lambda: any(each.unread_bytes > 1_000 for each in grpc.connections()), "the messages wait")


def status_of(peer: SocketPeer, stream_id: int) -> tuple[Code, str]:
    """Permit the response of one call, and return its status."""
    peer.send(window_update_frame(stream_id, 10_000))
    answer = protos.ReceiveMessageResponse.FromString(messages(peer.until(frames.DATA).payload)[0])
    return Code(answer.status.code), answer.status.message


def test_a_client_that_does_not_read_its_messages_gets_no_more(
    server: Server, tool: GrpcTool, topic: str, shut_peer: SocketPeer
) -> None:
    tool.send(message(topic, b"x" * 2_000, "id-1"))
    shut_peer.send(receive_call(1))
    wait_for_unread(server)
    tool.send(message(topic, b"second", "id-2"))

    shut_peer.send(receive_call(3))

    code, text = status_of(shut_peer, 3)
    assert code is Code.TOO_MANY_REQUESTS
    assert "bytes of responses wait until the client reads them, allowed are 1000; receive more when" in text
    assert tool.receive(GROUP, topic, wait_s=20).bodies == [b"second"]


def test_a_receive_that_waited_gets_no_message_either_and_another_client_gets_it(
    server: Server, tool: GrpcTool, topic: str, shut_peer: SocketPeer
) -> None:
    """A client could send many receives before the first message is there."""
    shut_peer.send(receive_call(1, count=1), receive_call(3, count=1))
    wait_for_receives(server, 2)
    tool.send(message(topic, b"x" * 2_000, "id-1"))
    wait_for_unread(server)

    tool.send(message(topic, b"second", "id-2"))

    assert status_of(shut_peer, 3)[0] is Code.TOO_MANY_REQUESTS
    received = tool.receive(GROUP, topic, wait_s=20)
    assert received.bodies == [b"second"]
    assert received.messages[0].system_properties.delivery_attempt == 1


# --- the end of the server ------------------------------------------------------------------------


def test_a_server_that_stops_sends_goaway_before_it_answers(server: Server, topic: str, open_peer: OpenPeer) -> None:
    """A consumer receives again as soon as it has an answer: on another connection, of a server that runs."""
    peer = open_peer()
    peer.send(receive_call())
    wait_for_receives(server, 1)

    thread = threading.Thread(target=server.stop)
    thread.start()

    assert peer.until(frames.GOAWAY).code is ErrorCode.NO_ERROR
    assert peer.response()[0]["grpc-status"] == "0"
    assert peer.is_ended()
    thread.join()


# --- tools ----------------------------------------------------------------------------------------


def test_tools_count_the_receives_that_wait(server: Server, tool: GrpcTool, topic: str) -> None:
    streams = [tool.start_receive(GROUP, topic, wait_s=20) for _ in range(3)]
    wait_for_receives(server, 3)

    with Tool(server.remoting.address) as remoting:
        header = PollingInfoRequestHeader(consumer_group=GROUP, topic=topic, queue_id=-1)
        answer = remoting.request(RequestCode.POLLING_INFO, header).header(PollingInfoResponseHeader)

    assert answer.polling_num == 3
    assert {each.name: each.value for each in server.engine.metrics.samples()}["pop.held"] == 3
    for stream in streams:
        stream.cancel()
