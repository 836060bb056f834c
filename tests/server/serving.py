"""A broker server without sockets on a virtual clock: tests call its processors directly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import HostAddress, Message, MessageExt
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.bodies.own_requests import SendSequencedRequestHeader
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.server import AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.server.requests.response import problem_response
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from tests.server.tool import pull_header, send_header

LISTEN = HostAddress("127.0.0.1", 10911)
SECRET = "a secret that is never shown"
"""Secret key of all accounts."""
_ids = itertools.count(1)


class RecordingConnection:
    """Records what is sent. It has the interface of `mqtemplate.remoting.connection.Connection`.

    Args:
        access_key: Account that signs the requests over this connection. None: they are not signed.
    """

    def __init__(self, remote: HostAddress = HostAddress("127.0.0.1", 54321), *, access_key: str | None = None) -> None:
        self.id = next(_ids)
        self.access_key = access_key
        self.remote = remote
        self.is_open = True
        self.replies: list[RemotingCommand] = []
        self.pushed: list[RemotingCommand] = []
        self.closed_for: str | None = None

    def reply(self, response: RemotingCommand, *, body: Sequence[bytes] = ()) -> None:
        if self.is_open:
            self.replies.append(replace(response, body=b"".join(body)) if body else response)

    def send_one_way(self, request: RemotingCommand) -> None:
        self.pushed.append(request)

    def request(self, request: RemotingCommand, timeout_ms: int, callback: Callable[..., None]) -> None:
        self.pushed.append(request)

    def close(self, reason: str) -> None:
        self.closed_for = reason
        self.is_open = False


class Serving:
    """A server over an engine in memory.

    Args:
        acl: Access control: connections with an access key sign their requests with `SECRET`.
    """

    def __init__(
        self,
        settings: BrokerServerSettings | None = None,
        engine: EmbeddedBroker | None = None,
        engine_settings: EmbeddedSettings | None = None,
        acl: AclSettings | None = None,
    ) -> None:
        self.engine = engine or EmbeddedBroker(None, engine_settings, VirtualClock())
        assert isinstance(self.engine.clock, VirtualClock)
        self.clock = self.engine.clock
        self.server = BrokerServer(self.engine, settings, acl=acl)
        self.connection = RecordingConnection()

    def __enter__(self) -> Self:
        self.server.load()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.engine.close()

    # --- requests ------------------------------------------------------------------------------

    def request(
        self,
        code: int,
        header: Any = None,
        body: bytes = b"",
        *,
        over: RecordingConnection | None = None,
        version: int = Version.V5_5_0,
        one_way: bool = False,
    ) -> RemotingCommand | None:
        """Return the response that a client would receive, errors included; None before it is there."""
        request = RemotingCommand.request(code, header, body, opaque=7, one_way=one_way)
        request.version, request.language = version, LanguageCode.JAVA
        connection = over or self.connection
        if connection.access_key is not None:
            sign_command(request, connection.access_key, SECRET)
        return self.process(connection, request)

    def process(self, connection: RecordingConnection, request: RemotingCommand) -> RemotingCommand | None:
        """Return the response to a prepared request."""
        before = len(connection.replies)
        processor, guard = self.server.all_processors[request.code], self.server.guard
        try:
            response = None if guard is None else guard(connection, request)  # type: ignore[arg-type]
            if response is None:
                response = processor(connection, request)  # type: ignore[arg-type]
        except Exception as exc:
            response = problem_response(request, exc)
            if response is None:
                raise
        if response is None and len(connection.replies) > before:
            response = connection.replies[-1]
        return None if request.is_one_way else response

    def disconnect(self, connection: RecordingConnection) -> None:
        """Close a connection, as its client does."""
        connection.is_open = False
        for callback in self.server.remoting._close_callbacks:
            callback(connection)  # type: ignore[arg-type]

    def step(self) -> None:
        """Step all services until no work is due."""
        for _ in range(20):
            for service in [*self.engine.services(), *self.server.services()]:
                service.step()

    def advance(self, milliseconds: int) -> None:
        """Advance the clock, in steps of at most a second."""
        end = self.clock.now_ms() + milliseconds
        while self.clock.now_ms() < end:
            self.clock.move_ms(min(1_000, end - self.clock.now_ms()))
            self.step()

    # --- frequent requests ---------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: bytes = b"hello",
        properties: dict[str, str] | None = None,
        *,
        code: int = RequestCode.SEND_MESSAGE_V2,
        over: RecordingConnection | None = None,
        one_way: bool = False,
        version: int = Version.V5_5_0,
        **header: Any,
    ) -> RemotingCommand | None:
        sent = send_header(topic, **{"queue_id": 0, "properties": properties or {}, **header})
        return self.request(code, sent, body, over=over, one_way=one_way, version=version)

    def send_batch(self, topic: str, *messages: Message, **header: Any) -> RemotingCommand | None:
        body = encode_batch(messages)
        return self.send(topic, body, {"WAIT": "true"}, code=RequestCode.SEND_BATCH_MESSAGE, batch=True, **header)

    def send_sequenced(
        self,
        *messages: Message,
        over: RecordingConnection | None = None,
        app_id: str = "query",
        version: int = 1,
        first: int = 0,
    ) -> RemotingCommand:
        """Send messages to queue 0 of their topics with numbers."""
        header = SendSequencedRequestHeader(
            producer_group="g", app_id=app_id, version=version, partition=0, first=first, born_timestamp=1
        )
        body = encode_queue_batches([(each, 0) for each in messages], {each.topic: each.topic for each in messages})
        response = self.request(RequestCode.SEND_SEQUENCED_MESSAGES, header, body, over=over)
        assert response is not None
        return response

    def heartbeat(
        self,
        group: str,
        *topics: str,
        over: RecordingConnection | None = None,
        client_id: str = "client@1",
        expression: str = "*",
        kind: str = "TAG",
        sub_version: int = 1,
        model: str = "CLUSTERING",
        producers: Sequence[str] = (),
        without_sub: bool = False,
    ) -> RemotingCommand:
        subscriptions = [subscription(topic, expression, kind, sub_version) for topic in topics]
        subscriptions.append(subscription(RETRY_TOPIC_PREFIX + group, "*", "TAG", sub_version))
        consumer = ConsumerData(group_name=group, message_model=model, subscription_data_set=subscriptions)
        heartbeat = HeartbeatData(
            client_id=client_id,
            consumer_data_set=[consumer] if topics else [],
            producer_data_set=[ProducerData(group_name=name) for name in producers],
            without_sub=without_sub,
        )
        response = self.request(RequestCode.HEART_BEAT, None, heartbeat.encode(), over=over)
        assert response is not None
        return response

    def pull(
        self,
        group: str,
        topic: str,
        queue_offset: int = 0,
        *,
        queue_id: int = 0,
        sys_flag: int = 0,
        over: RecordingConnection | None = None,
        **header: Any,
    ) -> RemotingCommand | None:
        sent = pull_header(topic, queue_offset, group=group, queue_id=queue_id, sys_flag=sys_flag, **header)
        return self.request(RequestCode.PULL_MESSAGE, sent, over=over)

    def pull_all(self, topic: str, queue_offset: int = 0, *, queue_id: int = 0) -> RemotingCommand:
        """Pull all messages with a subscription in the request. The pull is not held."""
        response = self.pull("reader", topic, queue_offset, queue_id=queue_id, sys_flag=PullSysFlag.SUBSCRIPTION)
        assert response is not None
        return response

    def read(self, topic: str, *, queue_id: int = 0) -> list[MessageExt]:
        """Return the messages of one queue, as a client decodes them."""
        response = self.pull_all(topic, queue_id=queue_id)
        if response.code == ResponseCode.PULL_NOT_FOUND:
            return []
        assert response.code == ResponseCode.SUCCESS, response
        return decode_messages(response.body, self.engine.name)


def subscription(topic: str, expression: str = "*", kind: str = "TAG", sub_version: int = 1) -> SubscriptionData:
    """Return the subscription that Java's ``FilterAPI`` creates."""
    tags = [tag.strip() for tag in expression.split("||")] if kind == "TAG" and expression != "*" else []
    return SubscriptionData(
        topic=topic,
        sub_string=expression,
        tags_set=tags,
        code_set=[java_string_hash(tag) for tag in tags],
        sub_version=sub_version,
        expression_type=kind,
    )
