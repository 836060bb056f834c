"""Calls with good and bad input, whose answers by RocketMQ's proxy 5.5.0 are in ``golden_proxy.json``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, GrpcMessageType
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    consumer_settings,
    delayed,
    message,
    producer_settings,
)

TOPICS = {"normal": "", "fifo": "FIFO", "delay": "DELAY", "transaction": "TRANSACTION", "mixed": "MIXED", "empty": ""}
"""Name -> message type, which topics without one lack."""
GROUPS = {"group": False, "ordered": True}
"""Name -> True for a group that consumes in order."""

_COMMIT, _ROLLBACK = 1, 2
_HOUR_S = 3_600


class Answer(NamedTuple):
    """What a server answered.

    Attributes:
        code: Of the status in the answer, or the name of the status of gRPC.
        message: Of the same status.
    """

    code: int | str
    message: str


class Creator(Protocol):
    """Creates topics and groups of a server."""

    def create_topic(self, topic: str, message_type: str = "") -> object: ...
    def create_group(self, group: str, *, ordered: bool = False) -> object: ...


class World:
    """A client of a server that has the topics and groups, and one that has reported no settings."""

    def __init__(self, connect: Callable[..., GrpcTool], creator: Creator, prefix: str) -> None:
        self.prefix = prefix
        for topic, kind in TOPICS.items():
            creator.create_topic(prefix + topic, kind)
        for group, ordered in GROUPS.items():
            creator.create_group(prefix + group, ordered=ordered)
        self.connect = connect
        self.tool = connect(f"{prefix}consumer")
        self.producer = connect(f"{prefix}producer")
        self.nobody = connect(f"{prefix}nobody")
        self._ids = itertools.count()
        topics = [prefix + topic for topic in TOPICS]
        self.streams = [self.tool.telemetry(), self.producer.telemetry()]
        self.streams[0].report(consumer_settings(self.group, *topics))
        self.streams[1].report(producer_settings(*topics))

    def close(self) -> None:
        for stream in self.streams:
            stream.cancel()
        for tool in (self.tool, self.producer, self.nobody):
            tool.channel.close()

    @property
    def group(self) -> str:
        return f"{self.prefix}group"

    def topic(self, name: str = "normal") -> str:
        return self.prefix + name

    def message(self, name: str = "normal", body: bytes = b"body", **system: Any) -> Any:
        """Return a message with an ID of its own."""
        system.setdefault("message_id", f"{next(self._ids):034X}")
        return message(self.topic(name), body, **system)

    def delayed(self, delay_ms: int, name: str = "delay") -> Any:
        return delayed(self.topic(name), int(time.time() * 1_000) + delay_ms, f"{next(self._ids):034X}")

    def send(self, *messages: Any) -> Any:
        return self.producer.send(*messages)

    def received(self) -> str:
        """Send a message and receive it; return its receipt handle."""
        self.send(self.message())
        return self.tool.receive(self.group, self.topic(), count=1).handle

    def half_message(self) -> str:
        """Send a half message, and return its transaction ID."""
        sent = self.send(self.message("transaction", message_type=GrpcMessageType.TRANSACTION))
        return str(sent.entries[0].transaction_id)

    def recall_handle(self) -> str:
        """Send a message that is due in an hour, and return its handle."""
        return str(self.send(self.delayed(_HOUR_S * 1_000)).entries[0].recall_handle)


@dataclass(frozen=True, slots=True)
class Probe:
    """One call.

    Attributes:
        call: Name of the method.
        given: Its input, in words.
        run: Returns an answer with a status, or a status.
    """

    call: str
    given: str
    run: Callable[[World], Any]

    @property
    def name(self) -> str:
        return f"{self.call}: {self.given}"

    def answer(self, world: World) -> Answer:
        """Call the method."""
        try:
            answer = self.run(world)
        except grpc.RpcError as error:
            return Answer(error.code().name, error.details())
        except StopIteration:
            return Answer("OK", "the stream ended")
        status = answer.status if hasattr(answer, "status") else answer
        return Answer(status.code, status.message)


# --- calls -------------------------------------------------------------------------------------------------


def _routes() -> Iterator[Probe]:
    for given, topic in (
        ("a topic", lambda world: world.topic()),
        ("an unknown topic", lambda world: f"{world.prefix}unknown"),
        ("an empty topic", lambda world: ""),
        ("a topic with a space", lambda world: "a b"),
        ("a topic of 128 characters", lambda world: "a" * 128),
        ("a system topic", lambda world: "SCHEDULE_TOPIC_XXXX"),
    ):
        yield Probe("QueryRoute", given, lambda world, topic=topic: world.tool.route(topic(world)))
    yield Probe("QueryRoute", "no client ID", lambda world: _anonymous(world).route(world.topic()))
    yield Probe("QueryAssignment", "a group and a topic", lambda world: _assignment(world, world.topic()))
    yield Probe("QueryAssignment", "an unknown topic", lambda world: _assignment(world, f"{world.prefix}unknown"))
    yield Probe("QueryAssignment", "an empty group", lambda world: _assignment(world, world.topic(), ""))


def _anonymous(world: World) -> GrpcTool:
    return world.connect("")


def _assignment(world: World, topic: str, group: str | None = None) -> Any:
    request = protos.QueryAssignmentRequest()
    request.topic.name, request.group.name = topic, world.group if group is None else group
    request.endpoints.addresses.add(host="127.0.0.1", port=8081)
    request.endpoints.scheme = 1  # IPv4
    return world.tool.call("QueryAssignment", request)


def _clients() -> Iterator[Probe]:
    yield Probe("Heartbeat", "a producer with settings", lambda world: world.producer.heartbeat())
    yield Probe("Heartbeat", "a consumer with settings", lambda world: world.tool.heartbeat(world.group))
    yield Probe("Heartbeat", "a client without settings", lambda world: world.nobody.heartbeat())
    yield Probe("Heartbeat", "a consumer with an empty group", lambda world: world.tool.heartbeat(""))
    yield Probe("NotifyClientTermination", "a client without settings", lambda world: world.nobody.terminate())
    for given, settings in (
        ("the settings of a producer", lambda world: producer_settings(world.topic())),
        ("the settings of a producer without topics", lambda world: producer_settings()),
        ("the settings of a consumer", lambda world: consumer_settings(world.group, world.topic())),
        ("settings of no kind", lambda world: protos.Settings(client_type=ClientType.PRODUCER)),
        ("a topic with a space", lambda world: producer_settings("a b")),
        ("an unknown topic", lambda world: producer_settings(f"{world.prefix}unknown")),
        ("an unknown group", lambda world: consumer_settings(f"{world.prefix}unknown", world.topic())),
        ("a group with a space", lambda world: consumer_settings("a b", world.topic())),
        ("a tag expression that cannot be parsed", lambda world: _filtered(world, "||", sql=False)),
        ("an SQL expression that cannot be parsed", lambda world: _filtered(world, "a >", sql=True)),
    ):
        yield Probe("Telemetry", given, lambda world, settings=settings: _report(world, settings(world)))


def _filtered(world: World, expression: str, *, sql: bool) -> Any:
    settings = consumer_settings(world.group, world.topic(), expression=expression)
    settings.subscription.subscriptions[0].expression.type = 2 if sql else 1
    return settings


def _report(world: World, settings: Any) -> Any:
    tool = world.connect(f"{world.prefix}reporter-{time.monotonic_ns()}")
    stream = tool.telemetry()
    try:
        return stream.report(settings)
    finally:
        stream.cancel()
        tool.channel.close()


def _messages() -> Iterator[Probe]:
    fifo, transaction = GrpcMessageType.FIFO, GrpcMessageType.TRANSACTION
    for given, build in (
        ("a message", lambda world: [world.message()]),
        ("no message", lambda world: []),
        ("two messages", lambda world: [world.message(), world.message()]),
        ("two topics", lambda world: [world.message(), world.message("mixed")]),
        ("an empty topic", lambda world: [message("")]),
        ("a system topic", lambda world: [message("SCHEDULE_TOPIC_XXXX")]),
        ("an unknown topic", lambda world: [message(f"{world.prefix}unknown")]),
        ("an empty body", lambda world: [world.message(body=b"")]),
        ("a body of 4 MiB", lambda world: [world.message(body=b"x" * 4_194_304)]),
        ("a body of 4 MiB and a byte", lambda world: [world.message(body=b"x" * 4_194_305)]),
        ("128 properties", lambda world: [_with_properties(world, {f"p{at}": "x" for at in range(128)})]),
        ("129 properties", lambda world: [_with_properties(world, {f"p{at}": "x" for at in range(129)})]),
        ("properties of more than 16 KiB", lambda world: [_with_properties(world, {"p": "x" * 16_384})]),
        ("a reserved property", lambda world: [_with_properties(world, {"DELAY": "3"})]),
        ("a property with a control character", lambda world: [_with_properties(world, {"p": "\x01"})]),
        ("an empty tag", lambda world: [world.message(tag="")]),
        ("a tag with |", lambda world: [world.message(tag="a|b")]),
        ("a tag with a control character", lambda world: [world.message(tag="a\x01")]),
        ("an empty key", lambda world: [_with_keys(world, " ")]),
        ("a key with a control character", lambda world: [_with_keys(world, "a\x01")]),
        ("an empty message ID", lambda world: [world.message(message_id="")]),
        ("an empty message group", lambda world: [world.message("fifo", message_group="", message_type=fifo)]),
        ("a message group of 63 bytes", lambda world: [_grouped(world, 63)]),
        ("a message group of 64 bytes", lambda world: [_grouped(world, 64)]),
        ("a deliver time in an hour", lambda world: [world.delayed(_HOUR_S * 1_000)]),
        ("a deliver time in the past", lambda world: [world.delayed(-1_000)]),
        ("a deliver time in two days", lambda world: [world.delayed(48 * _HOUR_S * 1_000)]),
        ("a message without a deliver time to a DELAY topic", lambda world: [world.message("delay")]),
        ("a delayed message to a topic without a type", lambda world: [world.delayed(1_000, "normal")]),
        ("a delayed message to a MIXED topic", lambda world: [world.delayed(1_000, "mixed")]),
        ("a message without a group to a FIFO topic", lambda world: [world.message("fifo")]),
        ("a half message", lambda world: [world.message("transaction", message_type=transaction)]),
        ("a half message to a topic without a type", lambda world: [world.message(message_type=transaction)]),
        ("a recovery duration of two hours", lambda world: [_recovered(world, 2 * _HOUR_S)]),
    ):
        yield Probe("SendMessage", given, lambda world, build=build: world.send(*build(world)))
    yield Probe("SendMessage", "a client without settings", lambda world: world.nobody.send(world.message()))


def _with_properties(world: World, properties: dict[str, str]) -> Any:
    made = world.message()
    made.user_properties.update(properties)
    return made


def _with_keys(world: World, *keys: str) -> Any:
    made = world.message()
    made.system_properties.keys.extend(keys)
    return made


def _grouped(world: World, length: int) -> Any:
    return world.message("fifo", message_group="g" * length, message_type=GrpcMessageType.FIFO)


def _recovered(world: World, seconds: int) -> Any:
    made = world.message("transaction", message_type=GrpcMessageType.TRANSACTION)
    made.system_properties.orphaned_transaction_recovery_duration.seconds = seconds
    return made


def _receives() -> Iterator[Probe]:
    def receive(given: str, topic: str = "empty", group: str = "group", **options: Any) -> Probe:
        return Probe(
            "ReceiveMessage",
            given,
            lambda world: world.tool.receive(world.prefix + group, world.topic(topic), **options),
        )

    yield receive("a topic without messages")
    yield receive("a topic without messages, renewed by the server", auto_renew=True, invisible_s=None)
    yield receive("an invisible time of 9 s", invisible_s=9)
    yield receive("an invisible time of 13 h", invisible_s=13 * _HOUR_S)
    yield receive("no invisible time", invisible_s=None)
    yield receive("a deadline of 3 s and a wait of 5 s", wait_s=5, timeout=3)
    yield receive("no wait time", wait_s=None, timeout=9)
    yield receive("a wait of 0 s", wait_s=0)
    yield receive("a tag expression that cannot be parsed", expression="||")
    yield receive("an SQL expression that cannot be parsed", expression="a >", sql=True)
    yield receive("an unknown topic", topic="unknown")
    yield receive("an unknown group", group="unknown")
    yield receive("an illegal group", group=" ")
    yield receive("a batch of 0", count=0)
    yield Probe(
        "ReceiveMessage",
        "a client without settings",
        lambda world: world.nobody.receive(world.group, world.topic("empty")),
    )
    yield Probe("ReceiveMessage", "a topic with a message", _receive_one)
    yield Probe("ReceiveMessage", "a message that the tag does not select", _receive_unselected)


def _receive_one(world: World) -> Any:
    world.send(world.message())
    return world.tool.receive(world.group, world.topic(), count=1)


def _receive_unselected(world: World) -> Any:
    world.send(world.delayed(-1, "mixed"))
    return world.tool.receive(world.group, world.topic("mixed"), expression="other")


def _handles() -> Iterator[Probe]:
    topic, group = World.topic, World.group.fget
    assert group is not None
    yield Probe("AckMessage", "no entries", lambda world: world.tool.ack(world.group, world.topic()))
    yield Probe("AckMessage", "a handle", lambda world: _ack(world, world.received()))
    yield Probe("AckMessage", "an acknowledged handle", lambda world: _twice(world, world.received()))
    yield Probe("AckMessage", "an unreadable handle", lambda world: _ack(world, "unreadable"))
    yield Probe("AckMessage", "a handle of another broker", lambda world: _ack(world, _of_another_broker(world)))
    yield Probe("AckMessage", "an expired handle", lambda world: _ack(world, _expired(world)))
    yield Probe("AckMessage", "a handle that a change replaced", lambda world: _ack(world, _replaced(world)))
    yield Probe(
        "AckMessage", "a handle and an unreadable one", lambda world: _ack(world, world.received(), "unreadable")
    )
    for given, handle, seconds in (
        ("20 s", World.received, 20),
        ("0 s", World.received, 0),
        ("13 h", World.received, 13 * _HOUR_S),
        ("an unreadable handle", lambda world: "unreadable", 20),
        ("an expired handle", _expired, 20),
        ("a handle that a change replaced", _replaced, 20),
        ("an acknowledged handle", _acknowledged, 20),
    ):
        yield Probe(
            "ChangeInvisibleDuration",
            given,
            lambda world, handle=handle, seconds=seconds: world.tool.change(
                group(world), topic(world), handle(world), seconds
            ),
        )
    for given, handle in (
        ("a handle", World.received),
        ("an unreadable handle", lambda world: "unreadable"),
        ("an acknowledged handle", _acknowledged),
    ):
        yield Probe(
            "ForwardMessageToDeadLetterQueue",
            given,
            lambda world, handle=handle: world.tool.forward(group(world), topic(world), handle(world)),
        )


def _ack(world: World, *handles: str) -> Any:
    return world.tool.ack(world.group, world.topic(), *handles)


def _twice(world: World, handle: str) -> Any:
    _ack(world, handle)
    return _ack(world, handle)


def _acknowledged(world: World) -> str:
    handle = world.received()
    _ack(world, handle)
    return handle


def _of_another_broker(world: World) -> str:
    parts = world.received().split(" ")
    parts[5] = "broker-z"
    return " ".join(parts)


def _expired(world: World) -> str:
    """Return the handle of a message whose pop was an hour ago."""
    parts = world.received().split(" ")
    parts[1] = str(int(parts[1]) - _HOUR_S * 1_000)
    return " ".join(parts)


def _replaced(world: World) -> str:
    handle = world.received()
    world.tool.change(world.group, world.topic(), handle, 20)
    return handle


def _ends() -> Iterator[Probe]:
    def end(world: World, transaction_id: str, resolution: int = _COMMIT) -> Any:
        return world.producer.end_transaction(world.topic("transaction"), transaction_id, resolution)

    def end_twice(world: World, second: int) -> Any:
        transaction_id = world.half_message()
        end(world, transaction_id)
        return end(world, transaction_id, second)

    yield Probe("EndTransaction", "a commit", lambda world: end(world, world.half_message()))
    yield Probe("EndTransaction", "a rollback", lambda world: end(world, world.half_message(), _ROLLBACK))
    yield Probe("EndTransaction", "no resolution", lambda world: end(world, world.half_message(), 0))
    yield Probe("EndTransaction", "an empty transaction ID", lambda world: end(world, " "))
    yield Probe("EndTransaction", "an unknown transaction ID", lambda world: end(world, "0" * 34))
    yield Probe("EndTransaction", "a second commit", lambda world: end_twice(world, _COMMIT))
    yield Probe("EndTransaction", "a rollback after a commit", lambda world: end_twice(world, _ROLLBACK))

    def recall(world: World, handle: str, topic: str = "delay") -> Any:
        return world.producer.recall(world.topic(topic), handle)

    def recall_twice(world: World) -> Any:
        handle = world.recall_handle()
        recall(world, handle)
        return recall(world, handle)

    yield Probe("RecallMessage", "a handle", lambda world: recall(world, world.recall_handle()))
    yield Probe("RecallMessage", "a handle that was recalled", recall_twice)
    yield Probe("RecallMessage", "an unreadable handle", lambda world: recall(world, "unreadable"))
    yield Probe("RecallMessage", "an empty handle", lambda world: recall(world, ""))
    yield Probe("RecallMessage", "a topic without a type", lambda world: recall(world, world.recall_handle(), "normal"))
    yield Probe("RecallMessage", "an unknown topic", lambda world: recall(world, world.recall_handle(), "unknown"))


def _others() -> Iterator[Probe]:
    for method in ("UpdateOffset", "GetOffset", "QueryOffset"):
        yield Probe(
            method,
            "an empty request",
            lambda world, method=method: world.tool.call(method, getattr(protos, f"{method}Request")()),
        )
    yield Probe(
        "SyncLiteSubscription",
        "a topic that is not LITE",
        lambda world: world.tool.call("SyncLiteSubscription", _lite(world)),
    )


def _lite(world: World) -> Any:
    request = protos.SyncLiteSubscriptionRequest()
    request.topic.name, request.group.name = world.topic(), world.group
    request.lite_topic_set.append("lite")
    return request


PROBES = {
    probe.name: probe
    for probes in (_routes, _clients, _messages, _receives, _handles, _ends, _others)
    for probe in probes()
}
"""All calls by their names, in the order in which they are run: some leave messages that others receive."""
