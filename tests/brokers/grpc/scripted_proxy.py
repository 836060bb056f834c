"""A proxy whose answers a test sets: a gRPC server in this process that stores nothing."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import grpc

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import AddressScheme, Code, GrpcMessageType, Permission

UNARY = (
    "QueryRoute",
    "Heartbeat",
    "SendMessage",
    "AckMessage",
    "ForwardMessageToDeadLetterQueue",
    "EndTransaction",
    "NotifyClientTermination",
    "ChangeInvisibleDuration",
    "RecallMessage",
)
Answer = Callable[[Any], Any]


def status(code: Code = Code.OK, message: str = "OK") -> Any:
    return protos.Status(code=int(code), message=message)


def received(body: bytes, receipt: str, *, topic: str = "orders", offset: int = 0, attempt: int = 1) -> Any:
    """A message as a proxy delivers it."""
    message = protos.Message(topic=protos.Resource(name=topic), body=body)
    system = message.system_properties
    system.message_id, system.receipt_handle = f"ID-{offset}", receipt
    system.queue_offset, system.delivery_attempt = offset, attempt
    system.store_host = "127.0.0.1:10911"
    return message


class ScriptedProxy:
    """Answers every request with OK, unless `answers` has another answer for its method.

    Attributes:
        address: ``host:port``.
        answers: Method -> function from the request to the answer.
        requests: Method -> the requests that arrived.
        metadata: Metadata of the last request of each method.
        to_deliver: Messages that the next ``ReceiveMessage`` returns; without any it waits until the client ends it.
        is_fifo: Setting of all groups.
        settings_status: Status of the answer to settings.
        answers_settings: False: settings get no answer.
        brokers: Names of the brokers in each route; each has a queue.
    """

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.metadata: dict[str, dict[str, str]] = {}
        self.to_deliver: list[Any] = []
        self.is_fifo = False
        self.brokers = ["broker-a"]
        self.settings_status = status()
        self.answers_settings = True
        self._commands: SimpleQueue[Any] = SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(32))
        handlers = {name: self._unary(name) for name in UNARY}
        handlers["Telemetry"] = grpc.stream_stream_rpc_method_handler(
            self._telemetry, protos.TelemetryCommand.FromString, lambda message: message.SerializeToString()
        )
        handlers["ReceiveMessage"] = grpc.unary_stream_rpc_method_handler(
            self._receive, protos.ReceiveMessageRequest.FromString, lambda message: message.SerializeToString()
        )
        handler = grpc.method_handlers_generic_handler("apache.rocketmq.v2.MessagingService", handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._commands.put(None)
        self._server.stop(0).wait()

    def send_command(self, command: Any) -> None:
        """Send a command over the telemetry stream of the first client."""
        self._commands.put(command)

    def _unary(self, name: str) -> Any:
        def answer(request: Any, context: Any) -> Any:
            self.requests[name].append(request)
            self.metadata[name] = dict(context.invocation_metadata())
            found = self.answers.get(name) or getattr(self, f"_{name}", None)
            return getattr(protos, f"{name}Response")(status=status()) if found is None else found(request)

        request_type = getattr(protos, f"{name}Request")
        return grpc.unary_unary_rpc_method_handler(
            answer, request_type.FromString, lambda message: message.SerializeToString()
        )

    def _QueryRoute(self, request: Any) -> Any:
        answer = protos.QueryRouteResponse(status=status())
        for number, name in enumerate(self.brokers):
            queue = answer.message_queues.add(id=number, permission=int(Permission.READ_WRITE))
            queue.topic.CopyFrom(request.topic)
            queue.accept_message_types.append(int(GrpcMessageType.NORMAL))
            queue.broker.name = name
            queue.broker.endpoints.scheme = int(AddressScheme.IPv4)
            queue.broker.endpoints.addresses.add(host="127.0.0.1", port=self.port)
        return answer

    def _SendMessage(self, request: Any) -> Any:
        answer = protos.SendMessageResponse(status=status())
        for offset, message in enumerate(request.messages):
            msg_id = message.system_properties.message_id
            answer.entries.add(status=status(), message_id=msg_id, transaction_id=msg_id, offset=offset)
        return answer

    def _telemetry(self, commands: Iterator[Any], context: Any) -> Iterator[Any]:
        for command in commands:
            self.requests["Telemetry"].append(command)
            if not command.HasField("settings") or not self.answers_settings:
                continue
            answer = protos.TelemetryCommand(status=self.settings_status)
            if self.settings_status.code == Code.OK:
                answer.settings.CopyFrom(command.settings)
                answer.settings.subscription.fifo = self.is_fifo
            yield answer
            if command.settings.HasField("publishing"):
                break
        else:
            return
        while (given := self._commands.get()) is not None:
            yield given

    def _receive(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests["ReceiveMessage"].append(request)
        found = self.answers.get("ReceiveMessage")
        if found is not None:
            yield from found(request)
            return
        messages, self.to_deliver = self.to_deliver, []
        if not messages:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(request.long_polling_timeout.ToMilliseconds() / 1_000)
            yield protos.ReceiveMessageResponse(status=status(Code.MESSAGE_NOT_FOUND, "no new message"))
            return
        yield protos.ReceiveMessageResponse(status=status())
        for message in messages:
            yield protos.ReceiveMessageResponse(message=message)
