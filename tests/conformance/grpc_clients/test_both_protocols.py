"""RocketMQ's Java clients of both protocols share topics and groups: `rocketmq-client-java`, and `rocketmq-client`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.peer.java_client import JavaClient, PeerMessage
from tests.conformance.client_programs import ClientUnavailableError
from tests.conformance.grpc_clients.programs import CLIENTS, run_cases
from tests.conformance.grpc_clients.servers import OWN, Administrator, GrpcServer
from tests.conformance.java_clients import now_ms
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(600)]

_TIMEOUT_MS = 90_000
_COUNT = 4
"""Messages that the gRPC client receives in one run."""
_LARGE = "large " * 20_000
_INVISIBLE_MS = 60_000
_EARLY_MS = {OWN: 0, "local": 1_000, "cluster": 1_000}
"""Maximum time by which a timer is early. RocketMQ's timers have slots of one second."""


@pytest.fixture(scope="module")
def remoting(open_server: GrpcServer) -> Iterator[JavaClient]:
    """The client of the remoting protocol."""
    try:
        CLIENTS["java"].command()
    except ClientUnavailableError as error:
        pytest.skip(str(error))
    with JavaClient(open_server) as client:
        client.connect()
        yield client


def _grpc(server: GrpcServer, prefix: str, case: str) -> dict[str, Any]:
    """Run a case of the client of the gRPC protocol."""
    found = run_cases("java", server, prefix, [case])[case]
    assert "error" not in found, found["error"]
    return found


def _create(server: GrpcServer, prefix: str) -> tuple[str, str]:
    """Create the topic and the group of the cases, and return their names."""
    topic, group = f"{prefix}shared", f"{prefix}shared-group"
    with Administrator(server) as administrator:
        administrator.create_topic(topic, "MIXED")
        administrator.create_group(group)
    return topic, group


def test_remoting_reads_what_grpc_sends(server_name: str, open_server: GrpcServer, remoting: JavaClient) -> None:
    """With ID, tag, keys, properties, message group and deliver time."""
    topic, group = _create(open_server, "from-grpc-")

    offered = _grpc(open_server, "from-grpc-", "offer")
    found = {_name(message): message for message in remoting.consume(group, topic, _COUNT, _TIMEOUT_MS)}

    assert {name: message.msg_id for name, message in found.items()} == offered["sent"]
    plain = found["plain"]
    assert (plain.tags, plain.keys) == ("paid", "k-1 k-2")
    assert plain.properties.items() >= {"color": "red", "größe": "2 m"}.items()
    assert found["large"].body == _LARGE.encode()
    assert found["ordered"].properties["__SHARDINGKEY"] == "g-1"
    handled_ms = found["delayed"].handled_timestamp
    assert handled_ms is not None
    assert handled_ms >= offered["deliver_ms"] - _EARLY_MS[server_name]


def _name(message: PeerMessage) -> str:
    return message.body.decode().partition(" ")[0]


def test_grpc_reads_what_remoting_sends(server_name: str, open_server: GrpcServer, remoting: JavaClient) -> None:
    """With ID, tag, keys, properties, delay, and a body that the sender has compressed."""
    topic, _ = _create(open_server, "from-remoting-")
    sent_ms = now_ms()
    properties = {"color": "red", "größe": "2 m"}
    sent = remoting.send(
        {"topic": topic, "body": b"plain", "tags": "paid", "keys": "k-1 k-2", "properties": properties},
        {"topic": topic, "body": _LARGE.encode()},
        {"topic": topic, "body": b"level", "level": 1},
        {"topic": topic, "body": b"delayed", "deliver_ms": sent_ms + 3_000},
    )

    received = _grpc(open_server, "from-remoting-", "take")["received"]

    found = {each["body"].partition(" ")[0]: each for each in received}
    names = ("plain", "large", "level", "delayed")
    assert {name: found[name]["id"] for name in names} == {
        name: result["msg_id"] for name, result in zip(names, sent, strict=True)
    }
    plain = found["plain"]
    assert (plain["tag"], plain["keys"]) == ("paid", ["k-1", "k-2"])
    assert plain["properties"].items() >= properties.items()
    assert found["large"]["body"] == _LARGE
    assert found["level"]["received_ms"] >= sent_ms + 1_000
    assert found["delayed"]["received_ms"] >= sent_ms + 3_000 - _EARLY_MS[server_name]
    [stored] = [message for message in remoting.read(topic, _COUNT, _TIMEOUT_MS) if _name(message) == "large"]
    assert stored.store_size is not None
    assert stored.store_size < len(_LARGE) // 10, "it is stored compressed"


def test_a_group_is_read_by_each_protocol_in_turns(open_server: GrpcServer, remoting: JavaClient) -> None:
    """gRPC, POP over remoting, and pull: each continues after what the one before it has acknowledged."""
    topic, group = _create(open_server, "turns-")

    def grpc() -> list[str]:
        return [each["body"] for each in _grpc(open_server, "turns-", "take")["received"]]

    def remote(mode: str) -> list[str]:
        _set_mode(remoting, topic, group, mode)
        member = remoting.join(group, topic, pop_invisible_ms=_INVISIBLE_MS)
        found = [message.body.decode() for message in remoting.handled(member, _COUNT, _TIMEOUT_MS)]
        # A member that leaves drops what it has not acknowledged yet.
        eventually(lambda: _is_done(remoting, group), "all messages are acknowledged", timeout_s=60)
        remoting.leave(member)
        return found

    for turn, kind in enumerate(("grpc", "POP", "PULL", "grpc", "PULL", "POP")):
        bodies = [f"{kind} {turn} {number}" for number in range(_COUNT)]
        remoting.send(*({"topic": topic, "body": body.encode()} for body in bodies))
        found = grpc() if kind == "grpc" else remote(kind)
        assert sorted(found) == bodies


def _is_done(remoting: JavaClient, group: str) -> bool:
    printed = remoting.mqadmin("consumerProgress", "-g", group)
    return "Consume Diff Total: 0\n" in printed and "Consume Inflight Total: 0\n" in printed


def _set_mode(remoting: JavaClient, topic: str, group: str, mode: str) -> None:
    printed = remoting.mqadmin("setConsumeMode", "-c", "DefaultCluster", "-t", topic, "-g", group, "-m", mode)
    assert "success" in printed, printed
