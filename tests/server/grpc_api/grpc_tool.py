"""A raw client of RocketMQ's gRPC protocol over grpcio, and a server for it. No rules of official clients are here."""

from __future__ import annotations

import hashlib
import hmac
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.experimental

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code, GrpcMessageType
from mqtemplate.message import HostAddress
from mqtemplate.server import AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.server.grpc_api.service import GrpcEndpoint

ANY_PORT = HostAddress("127.0.0.1", 0)
_TIMEOUT_S = 30.0


@contextmanager
def serving(
    engine: EmbeddedBroker | None = None,
    *,
    acl: AclSettings | None = None,
    settings: EmbeddedSettings | None = None,
    fast_path: bool = True,
    **options: Any,
) -> Iterator[BrokerServer[EmbeddedBroker]]:
    """Run a broker in memory, or over *engine*, with both protocols on free ports."""
    broker = engine or EmbeddedBroker(None, settings)
    remoting = options.pop("remoting", None)
    server_settings = BrokerServerSettings(**{"listen": ANY_PORT, "grpc_listen": ANY_PORT, **options})
    with BrokerServer(broker, server_settings, acl=acl, remoting=remoting, fast_path=fast_path) as server:
        yield server
    broker.close()


def advance(server: BrokerServer[EmbeddedBroker], milliseconds: int) -> None:
    """Advance the virtual clock of a server, in steps of at most a second, and step its services."""
    clock = server.engine.clock
    assert isinstance(clock, VirtualClock)
    end_ms = clock.now_ms() + milliseconds
    while True:
        for _ in range(3):
            for service in [*server.engine.services(), *server.services()]:
                service.step()
        endpoint(server).server.loop.wake()
        if clock.now_ms() >= end_ms:
            return
        clock.move_ms(min(1_000, end_ms - clock.now_ms()))


def endpoint(server: BrokerServer[Any]) -> GrpcEndpoint:
    """Return the gRPC server of a broker server."""
    assert server.grpc is not None
    return server.grpc


def create_topic(server: BrokerServer[Any], topic: str, kind: str | None = None, queues: int = 4, perm: int = 6) -> str:
    """Create a topic as an administrator does, and return its name."""
    config: dict[str, Any] = {"readQueueNums": queues, "writeQueueNums": queues, "perm": perm}
    if kind is not None:
        config["attributes"] = {"message.type": kind}
    server.topics.table.update(topic, config)
    return topic


def message(topic: str, body: bytes = b"body", message_id: str = "id-1", **system: Any) -> Any:
    """Return a message of a producer."""
    made = protos.Message(body=body)
    made.topic.name = topic
    made.system_properties.message_id = message_id
    made.system_properties.born_timestamp.GetCurrentTime()
    for name, value in system.items():
        setattr(made.system_properties, name, value)
    return made


def delayed(topic: str, deliver_ms: int, message_id: str = "id-1") -> Any:
    """Return a message with a deliver time."""
    made = message(topic, message_id=message_id, message_type=GrpcMessageType.DELAY)
    made.system_properties.delivery_timestamp.FromMilliseconds(deliver_ms)
    return made


def producer_settings(*topics: str) -> Any:
    """Return the settings of a producer."""
    settings = protos.Settings(client_type=ClientType.PRODUCER)
    settings.publishing.topics.extend(protos.Resource(name=topic) for topic in topics)
    settings.publishing.SetInParent()
    return settings


def consumer_settings(
    group: str, *topics: str, kind: ClientType = ClientType.SIMPLE_CONSUMER, expression: str = "*"
) -> Any:
    """Return the settings of a consumer."""
    settings = protos.Settings(client_type=kind)
    settings.subscription.group.name = group
    for topic in topics:
        entry = settings.subscription.subscriptions.add()
        entry.topic.name, entry.expression.expression = topic, expression
    return settings


class Received:
    """The answer to a receive."""

    def __init__(self, parts: list[Any]) -> None:
        self.kinds = [part.WhichOneof("content") for part in parts]
        self.status = next(part.status for part in parts if part.HasField("status"))
        self.messages = [part.message for part in parts if part.HasField("message")]

    @property
    def code(self) -> Code:
        return Code(self.status.code)

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.messages]

    @property
    def handle(self) -> str:
        """The receipt handle of the only message."""
        [only] = self.messages
        return str(only.system_properties.receipt_handle)


class Telemetry:
    """The stream of a client. Commands of the server are read one by one."""

    def __init__(self, call: Any, requests: queue.Queue[Any]) -> None:
        self._call = call
        self._requests = requests

    def send(self, **command: Any) -> None:
        self._requests.put(protos.TelemetryCommand(**command))

    def report(self, settings: Any) -> Any:
        """Send settings, and return the command that answers them."""
        self.send(settings=settings)
        return self.next()

    def next(self) -> Any:
        """Wait for the next command, or raise the error or StopIteration with which the stream ends."""
        return next(self._call)

    def end(self) -> None:
        self._requests.put(None)

    def cancel(self) -> None:
        self._call.cancel()


class GrpcTool:
    """One client.

    Args:
        keys: Access key and secret key.
        root: Certificate of the server, for TLS.
        polls: True: the thread of a receive waits for its messages itself, not for a thread of grpcio.
    """

    def __init__(
        self,
        server: BrokerServer[Any] | HostAddress,
        client_id: str = "client-1",
        *,
        keys: tuple[str, str] | None = None,
        root: bytes | None = None,
        metadata: dict[str, str] | None = None,
        polls: bool = False,
    ) -> None:
        address = server if isinstance(server, HostAddress) else endpoint(server).server.address
        # Channels with the same arguments would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        if polls:
            options.append((grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1))
        if root is None:
            self.channel = grpc.insecure_channel(str(address), options)
        else:
            self.channel = grpc.secure_channel(str(address), grpc.ssl_channel_credentials(root), options)
        self._streams: list[queue.Queue[Any]] = []
        self.client_id = client_id
        self._metadata = {
            "x-mq-client-id": client_id,
            "x-mq-language": "PYTHON",
            "x-mq-client-version": "5.1.2",
            "x-mq-date-time": "20260101T000000Z",
        }
        if keys is not None:
            self._metadata["authorization"] = authorization(*keys)
        self._metadata |= metadata or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.channel.close()
        for requests in self._streams:
            requests.put(None)  # else the thread of the stream waits for ever

    def metadata(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._metadata.items() if value]

    def call(self, method: str, request: Any, timeout: float = _TIMEOUT_S) -> Any:
        """Call a unary method."""
        response = getattr(protos, f"{method}Response")
        stub = self.channel.unary_unary(
            protos.method_path(method), lambda message: message.SerializeToString(), response.FromString
        )
        return stub(request, timeout=timeout, metadata=self.metadata())

    def telemetry(self) -> Telemetry:
        requests: queue.Queue[Any] = queue.Queue()
        self._streams.append(requests)
        stub = self.channel.stream_stream(
            protos.method_path("Telemetry"),
            lambda message: message.SerializeToString(),
            protos.TelemetryCommand.FromString,
        )
        return Telemetry(stub(iter(requests.get, None), timeout=600, metadata=self.metadata()), requests)

    # --- methods -------------------------------------------------------------------------------

    def route(self, topic: str) -> Any:
        return self.call("QueryRoute", protos.QueryRouteRequest(topic=protos.Resource(name=topic)))

    def send(self, *messages: Any) -> Any:
        return self.call("SendMessage", protos.SendMessageRequest(messages=messages))

    def start_receive(
        self,
        group: str,
        topic: str,
        *,
        count: int = 32,
        invisible_s: float | None = 30,
        wait_s: float | None = 5,
        timeout: float | None = _TIMEOUT_S,
        auto_renew: bool = False,
        attempt_id: str | None = None,
        expression: str = "*",
        sql: bool = False,
    ) -> Any:
        """Start a receive, and return its stream."""
        request = protos.ReceiveMessageRequest(batch_size=count, auto_renew=auto_renew)
        request.group.name, request.message_queue.topic.name = group, topic
        request.filter_expression.expression, request.filter_expression.type = expression, 2 if sql else 1
        if invisible_s is not None:
            request.invisible_duration.FromMilliseconds(int(invisible_s * 1_000))
        if wait_s is not None:
            request.long_polling_timeout.FromMilliseconds(int(wait_s * 1_000))
        if attempt_id is not None:
            request.attempt_id = attempt_id
        stub = self.channel.unary_stream(
            protos.method_path("ReceiveMessage"),
            lambda message: message.SerializeToString(),
            protos.ReceiveMessageResponse.FromString,
        )
        return stub(request, timeout=timeout, metadata=self.metadata())

    def receive(self, group: str, topic: str, **options: Any) -> Received:
        return Received(list(self.start_receive(group, topic, **options)))

    def ack(self, group: str, topic: str, *handles: str) -> Any:
        request = protos.AckMessageRequest(group=protos.Resource(name=group), topic=protos.Resource(name=topic))
        for handle in handles:
            request.entries.add(message_id="id", receipt_handle=handle)
        return self.call("AckMessage", request)

    def change(self, group: str, topic: str, handle: str, invisible_s: float, *, suspend: bool = False) -> Any:
        request = protos.ChangeInvisibleDurationRequest(receipt_handle=handle, suspend=suspend)
        request.group.name, request.topic.name = group, topic
        request.invisible_duration.FromMilliseconds(int(invisible_s * 1_000))
        return self.call("ChangeInvisibleDuration", request)

    def forward(self, group: str, topic: str, handle: str) -> Any:
        request = protos.ForwardMessageToDeadLetterQueueRequest(receipt_handle=handle)
        request.group.name, request.topic.name = group, topic
        return self.call("ForwardMessageToDeadLetterQueue", request)

    def heartbeat(self, group: str | None = None) -> Any:
        request = protos.HeartbeatRequest()
        if group is not None:
            request.group.name = group
        return self.call("Heartbeat", request)

    def terminate(self, group: str | None = None) -> Any:
        request = protos.NotifyClientTerminationRequest()
        if group is not None:
            request.group.name = group
        return self.call("NotifyClientTermination", request)

    def end_transaction(self, topic: str, transaction_id: str, resolution: int) -> Any:
        request = protos.EndTransactionRequest(transaction_id=transaction_id, resolution=resolution)
        request.topic.name = topic
        return self.call("EndTransaction", request)

    def recall(self, topic: str, handle: str) -> Any:
        request = protos.RecallMessageRequest(recall_handle=handle)
        request.topic.name = topic
        return self.call("RecallMessage", request)


def authorization(access_key: str, secret_key: str, date_time: str = "20260101T000000Z", *, upper: bool = True) -> str:
    """Return the header with which a client signs a call."""
    digest = hmac.digest(secret_key.encode(), date_time.encode(), hashlib.sha1).hex()
    signature = digest.upper() if upper else digest
    return f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
