"""A server on a virtual clock, and a client whose requests its fast path accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import HostAddress, Message
from mqtemplate.record.codec import StoredRecord
from mqtemplate.remoting import transport as transport_module
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.messages import encode_batch
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.server import AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.store.settings import FlushDiskType
from tests.remoting.wire import RawPeer
from tests.server.tool import ANY_PORT, pull_header, send_header

LISTEN = HostAddress("127.0.0.1", 10_911)
MAX_OFFSET = RemotingCommand(RequestCode.GET_MAX_OFFSET, 5, ext_fields={"topic": "orders", "queueId": "0"})


def send(opaque: int, body: bytes = b"paid", *, topic: str = "orders", queue_id: int = 0, **more: object) -> bytes:
    """Return the frame of a send as a Java client writes it. Properties that are None are left out."""
    given = {"UNIQ_KEY": f"7F{opaque:08X}", "WAIT": "true", **dict(more.pop("properties", {}))}  # type: ignore[call-overload]
    properties = {name: value for name, value in given.items() if value is not None}
    header = send_header(
        topic,
        queue_id,
        born_timestamp=1_700_000_000_000 + opaque,
        properties=properties,
        reconsume_times=0,
        batch=bool(more.pop("batch", False)),
    )
    code = int(more.pop("code", RequestCode.SEND_MESSAGE_V2))  # type: ignore[call-overload]
    request = RemotingCommand.request(code, header, body, opaque=opaque, one_way=bool(more.pop("one_way", False)))
    return encode_command(request)


@contextmanager
def serving(
    flush: FlushDiskType = FlushDiskType.SYNC_FLUSH,
    remoting: RemotingServerSettings | None = None,
    *,
    fast_path: bool = True,
    acl: AclSettings | None = None,
    **settings: object,
) -> Iterator[BrokerServer]:
    """Run a server on a virtual clock; without *fast_path* each request is decoded."""
    engine_settings = EmbeddedSettings(listen_host=LISTEN, flush_disk_type=flush, **settings)  # type: ignore[arg-type]
    engine = EmbeddedBroker(None, engine_settings, VirtualClock())
    settings_of_server = BrokerServerSettings(listen=ANY_PORT)
    server = BrokerServer(engine, settings_of_server, remoting=remoting, acl=acl, fast_path=fast_path)
    with server:
        yield server
    engine.close()


def pull(
    opaque: int, at: int = 0, *, queue_id: int = 0, sys_flag: int = PullSysFlag.SUBSCRIPTION, **more: Any
) -> bytes:
    """Return the frame of a pull as a Java client writes it."""
    fields = {"topic": "orders", "group": more.pop("consumer_group", "billing"), **more}
    header = pull_header(
        queue_offset=at, queue_id=queue_id, sys_flag=sys_flag, commit_offset=fields.pop("commit", 0), **fields
    )
    return encode_command(RemotingCommand.request(RequestCode.PULL_MESSAGE, header, opaque=opaque))


def batch(
    opaque: int,
    count: int = 10,
    size: int = 4,
    *,
    grows: bool = False,
    tag: str = "",
    queue_id: int = 0,
    code: int = RequestCode.SEND_BATCH_MESSAGE,
    of_messages: Mapping[str, str] = MappingProxyType({}),
    **more: object,
) -> bytes:
    """Return the frame of a batch, with ids that end with their numbers. Its messages are alike, or each is longer."""
    properties = dict(of_messages, TAGS=tag) if tag else dict(of_messages)
    messages = [
        Message("orders", bytes(size + number * grows), {"UNIQ_KEY": f"B{opaque:04}{number:03}"} | properties)
        for number in range(count)
    ]
    return send(opaque, encode_batch(messages), queue_id=queue_id, batch=True, code=code, **more)


NO_ID: dict[str, None] = {"UNIQ_KEY": None}
_LEARNED = [
    *(send(opaque, queue_id=opaque) for opaque in range(4)),
    *[batch(5, 3), batch(5, 3, code=RequestCode.SEND_MESSAGE_V2), batch(5, 3, properties=NO_ID), pull(5)] * 2,
]


@contextmanager
def known_client(
    server: BrokerServer, signed: Callable[[Sequence[bytes]], Sequence[bytes]] = list
) -> Iterator[RawPeer]:
    """Connect, and send until the queues exist and the next sends, batches and pulls are accepted by the fast path."""
    with RawPeer(server.remoting.address) as peer:
        for frame in signed(_LEARNED):
            assert peer.invoke_frame(frame).code == ResponseCode.SUCCESS
        yield peer


def answers(peer: RawPeer, count: int) -> dict[int, RemotingCommand]:
    """Return the next responses by opaque."""
    found = [peer.next_command() for _ in range(count)]
    assert None not in found
    return {response.opaque: response for response in found}


def records(server: BrokerServer) -> list[StoredRecord]:
    """Return all records, verified, without the port of the producer."""
    store, at, found = server.engine.store, 0, []
    while at < store.end_offset:
        record = store.read_at(at)
        if record is None:  # the blank at the end of a file
            at += store.sizes.commit_log - at % store.sizes.commit_log
            continue
        found.append(record._replace(born_host=record.born_host[:4]))
        at += record.total_size
    return found


def in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no turn of a connection end: on a busy machine that would divide what was read together."""
    monkeypatch.setattr(transport_module, "_TURN_S", 3_600.0)
