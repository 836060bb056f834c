"""The gRPC clients of a server: their settings, their groups, and the stream on which the server tells them something.

A client is known by its ID. It may use several connections, and its stream may break and come back: it stays a member
of its groups until it leaves, or sends no heartbeat for too long.

Source: RocketMQ ``proxy: ClientActivity``, ``GrpcClientChannel``, ``GrpcClientSettingsManager``.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from mqtemplate.durations import format_ms
from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.engine.clients import ClientNotice, Owner, owner_of
from mqtemplate.engine.pop.pop import PopService
from mqtemplate.errors import BrokerError, RemoteTimeoutError
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code, FilterType
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import StoredRecord
from mqtemplate.remoting.io_loop import Timer
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.grpc_api.checks import check_client_properties, check_group_name, check_topic_name
from mqtemplate.server.grpc_api.client_settings import CONSUMER_TYPES, merged_consumer, merged_producer
from mqtemplate.server.grpc_api.context import GrpcContext
from mqtemplate.server.grpc_api.messages import delivered_message, milliseconds
from mqtemplate.server.grpc_api.status import GrpcRefusedError
from mqtemplate.server.requests.refusal import RefusedError

_log = get_logger("mqtemplate.server")

_ids = itertools.count(-1, -1)
"""Clients have numbers of their own among the channels: one connection may have several, and one several."""

_ASSIGNMENT_MS = 6_000
"""All push consumers of RocketMQ's clients query their assignment every 5 seconds, until they close."""
_ANSWER_MS = 5_000
_MAX_REQUESTS = 100
_HANDLED = {
    Code.OK: "CR_SUCCESS",
    Code.FAILED_TO_CONSUME_MESSAGE: "CR_LATER",
    Code.MESSAGE_CORRUPTED: "CR_RETURN_NULL",
}
_NO_TAGS = re.compile(r"(\|\|)+")
_REQUEST_TIMEOUT_MS = 3_000
_LITE_TYPES = frozenset({ClientType.LITE_PUSH_CONSUMER, ClientType.LITE_SIMPLE_CONSUMER})


class GrpcSubscription(NamedTuple):
    """A subscription of a consumer. A `TopicSubscription`: a tuple, since a consumer may have thousands of them."""

    topic: str
    sub_string: str
    expression_type: str
    sub_version: int


class GrpcConsumer(NamedTuple):
    """A consumer in its group. A `ConsumerMember`."""

    group_name: str
    consume_type: str
    subscription_data_set: list[GrpcSubscription]
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"


def filter_of(expression: Any) -> tuple[str, str]:
    """Return the type and the text of a ``FilterExpression``, as a subscription has them.

    Raises:
        GrpcRefusedError: It has no tag at all. Source: ``FilterAPI.buildSubscriptionData``.
    """
    text = expression.expression or "*"
    if expression.type == FilterType.SQL:
        return "SQL92", text
    if _NO_TAGS.fullmatch(text):
        raise GrpcRefusedError(
            Code.ILLEGAL_FILTER_EXPRESSION, f"the expression {text[:64]!r} has no tag; for all messages pass '*'"
        )
    return "TAG", text


@dataclass(slots=True, eq=False)
class GrpcClient:
    """One client, by its ID. A `ClientChannel`.

    Attributes:
        owner: The connection of its first settings, as limits count it.
        stream: The newest stream of telemetry; None while there is none.
        settings: What the server needs of the ``apache.rocketmq.v2.Settings`` that the client sent last: its type, its
            timeout, and if it is a producer.
        producer_topics: Topics of a producer: each is the name of its producer group.
        group: Consumer group of a consumer.
        assignment_timer: Runs if the client, a push consumer, queries its assignment no more.
    """

    client_id: str
    language: str
    version: int
    access_key: str | None
    remote_address: HostAddress
    owner: Owner
    last_update_ms: int
    clients: GrpcClients
    id: int = field(default_factory=lambda: next(_ids))
    stream: GrpcCall | None = None
    settings: Any = None
    producer_topics: frozenset[str] = frozenset()
    group: str | None = None
    assignment_timer: Timer | None = None
    is_open: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, Callable[[Any], None]] = field(default_factory=dict)  # nonce -> takes the answer

    @property
    def kind(self) -> int:
        """The `ClientType`; 0 before the client has sent settings."""
        return 0 if self.settings is None else int(self.settings.client_type)

    @property
    def request_timeout_ms(self) -> int:
        """Timeout of the client's requests, but for receives."""
        found = 0 if self.settings is None else milliseconds(self.settings.request_timeout)
        return found if found > 0 else _REQUEST_TIMEOUT_MS

    @property
    def is_reachable(self) -> bool:
        return self.is_open and self.stream is not None

    def tell(self, notice: ClientNotice) -> None:
        """Send a transaction check. Changed groups mean nothing here: no client assigns queues to itself."""
        if isinstance(notice, TransactionCheck):
            self.command(self.clients.check_command(notice))

    def command(self, message: bytes) -> bool:
        """Send a ``TelemetryCommand``. Return False if the client has no stream: the command is lost."""
        with self._lock:
            if self.stream is not None:
                self.stream.write(message)
            return self.stream is not None

    def attach(self, stream: GrpcCall, answer: bytes) -> GrpcCall | None:
        """Use a stream for commands, after the *answer* to the settings that arrived on it. Return the older one.

        A client that has the answer is checked for the transactions that waited for a producer: they are due before the
        answer is sent. Their checks wait for the lock, so the answer is the first command.
        """
        with self._lock:
            older, self.stream = self.stream, stream
            if self.producer_topics:
                self.clients.producer_connected()
            stream.write(answer)
        return None if older is stream else older

    def detach(self, stream: GrpcCall | None = None) -> GrpcCall | None:
        """Use a stream no longer, or none at all; return the one that was used."""
        with self._lock:
            if stream is not None and self.stream is not stream:
                return None
            older, self.stream = self.stream, None
        return older

    # --- requests of tools ---------------------------------------------------------------------

    def report_threads(self, on_answer: Callable[[str | BrokerError], None]) -> None:
        command = protos.TelemetryCommand()
        command.print_thread_stack_trace_command.nonce = nonce = secrets.token_hex(16)

        def on_command(answer: Any) -> None:
            on_answer(answer if isinstance(answer, BrokerError) else answer.thread_stack_trace.thread_stack_trace)

        self._request(nonce, command, on_command)

    def handle_message(self, record: StoredRecord, topic: str, on_answer: Callable[[str | BrokerError], None]) -> None:
        command = protos.TelemetryCommand()
        verify = command.verify_message_command
        verify.nonce = nonce = secrets.token_hex(16)
        verify.message.CopyFrom(delivered_message(record, topic, self.clients.max_body_bytes))
        verify.message.system_properties.delivery_attempt = record.reconsume_times + 1

        def on_command(answer: Any) -> None:
            if isinstance(answer, BrokerError):
                on_answer(answer)
            elif (result := _HANDLED.get(answer.status.code)) is not None:
                on_answer(result)
            else:
                on_answer(BrokerError(f"{answer.status.message} (code {answer.status.code})"))

        self._request(nonce, command, on_command)

    def _request(self, nonce: str, command: Any, on_answer: Callable[[Any], None]) -> None:
        """Send a command, and pass the command with the same nonce to *on_answer*, or an error."""
        if len(self._waiting) < _MAX_REQUESTS:
            self._waiting[nonce] = on_answer  # before the command: the answer may be there at once
            self.clients.call_later(_ANSWER_MS, lambda: self._expire(nonce))
            if self.command(command.SerializeToString()):
                return
            self._waiting.pop(nonce, None)
        on_answer(BrokerError("it has no stream of telemetry, or too many requests wait for its answer"))

    def _expire(self, nonce: str) -> None:
        on_answer = self._waiting.pop(nonce, None)
        if on_answer is not None:
            on_answer(RemoteTimeoutError(f"no answer for {format_ms(_ANSWER_MS)}"))

    def answered(self, nonce: str, command: Any) -> None:
        """Take the answer to a request. One that is late has no effect."""
        on_answer = self._waiting.pop(nonce, None)
        if on_answer is not None:
            on_answer(command)

    def close(self, reason: str) -> None:
        _log.debug("server.grpc_client_ended", client=self.client_id, reason=reason)
        self.clients.end(self)


class GrpcClients:
    """The clients of one server by their IDs. Thread-safe.

    Args:
        core: Has the groups of all clients.
        check_command: Returns the command with which a client gets a transaction check.
        pop: Renews the messages of the clients, each a session of its own.
        call_later: Calls a function after a number of milliseconds.

    Attributes:
        max_body_bytes: Largest body that is decompressed for a client.
    """

    def __init__(
        self,
        core: ServerCore,
        check_command: Callable[[TransactionCheck], bytes],
        pop: PopService,
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._core = core
        self._clock = core.registration.engine.clock
        self._expire_ms = core.settings.client_expire_ms
        self.check_command = check_command
        self.producer_connected = core.registration.engine.transactions.producer_connected
        self.call_later = call_later
        self.max_body_bytes = core.registration.engine.settings.max_body_bytes()
        self._pop = pop
        self._lock = threading.Lock()
        self._clients: dict[str, GrpcClient] = {}
        self._leaving: Callable[[str], None] = lambda client_id: None

    def on_leaving(self, callback: Callable[[str], None]) -> None:
        """Call *callback* with the ID of each client that ends, or whose stream of telemetry ends.

        A client that leaves may wait for the end of its receives before it closes the connection.
        """
        self._leaving = callback

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    def has(self, client_id: str) -> bool:
        """Return True if the client lives."""
        return client_id in self._clients

    def find(self, context: GrpcContext) -> GrpcClient | None:
        """Return the client of a call, or None if it has sent no settings.

        Raises:
            GrpcRefusedError: The client with this ID belongs to another account.
        """
        client = self._clients.get(context.client_id)
        if client is not None and client.access_key != context.caller.account:
            raise _other_account(context)
        return client

    # --- settings ------------------------------------------------------------------------------

    def report(self, context: GrpcContext, settings: Any) -> Any:
        """Take over the settings of a client, and return them with those that the server decides.

        A missing group is created, for which tables are written.

        Raises:
            GrpcRefusedError, RefusedError: The settings are invalid, or the client has too many groups.
            StoreError: A table could not be written.
        """
        kind = settings.WhichOneof("pub_sub")
        if kind is None:
            raise GrpcRefusedError(
                Code.UNRECOGNIZED_CLIENT_TYPE, "the settings have neither publishing nor subscription"
            )
        check_client_properties(settings.client_properties)
        if kind == "publishing":
            most = self._core.settings.max_client_groups_per_connection
            if len(settings.publishing.topics) > most:
                raise GrpcRefusedError(
                    Code.TOO_MANY_REQUESTS,
                    f"a producer has at most {most} topics, got {len(settings.publishing.topics)}; use several, or "
                    "raise max-client-groups-per-connection",
                )
            topics = frozenset(check_topic_name(topic.name) for topic in settings.publishing.topics)
            client = self._updated(context, settings)
            self._register_producer(client, topics)
            return merged_producer(settings, self._core.registration.engine.settings.max_message_size)
        if settings.client_type in _LITE_TYPES:
            raise GrpcRefusedError(Code.NOT_IMPLEMENTED, "lite topics are not implemented; use a push consumer")
        group = check_group_name(settings.subscription.group.name)
        self._check_subscriptions(context, group, len(settings.subscription.subscriptions))
        subscriptions = self._subscriptions(settings.subscription.subscriptions)
        self._core.creations.group(context.caller, group)
        client = self._updated(context, settings)
        self._register_consumer(client, group, subscriptions)
        return merged_consumer(settings, self._core.creations.group(context.caller, group))

    def _check_subscriptions(self, context: GrpcContext, group: str, count: int) -> None:
        """Refuse too many subscriptions before they are built: in Python that takes tenths of a second."""
        client, caller = self.find(context), context.caller
        owner = caller.owner._replace(connection=0) if client is None else owner_of(client)
        self._core.clients.check_subscriptions(owner, group, count)

    def _subscriptions(self, entries: Iterable[Any]) -> list[GrpcSubscription]:
        """Return subscriptions whose topics and expressions are valid."""
        now_ms, built, compiled = self._clock.now_ms(), [], set()
        for entry in entries:
            topic = check_topic_name(entry.topic.name)
            kind, expression = found = filter_of(entry.expression)
            if found not in compiled:
                compiled.add(found)
                self._core.subscriptions.compile(kind, expression)
            built.append(GrpcSubscription(topic, expression, kind, now_ms))
        return built

    def _updated(self, context: GrpcContext, settings: Any) -> GrpcClient:
        """Return the client with new settings; it is created if it is new."""
        caller = context.caller
        try:
            self._core.access.bind_client(caller, context.client_id)
        except RefusedError as exc:
            raise GrpcRefusedError(Code.UNAUTHORIZED, str(exc)) from exc
        client = self.of(context)
        kept = protos.Settings(client_type=settings.client_type, request_timeout=settings.request_timeout)
        if settings.HasField("publishing"):
            kept.publishing.SetInParent()
        client.settings = kept  # not all of them: many clients may send a megabyte each
        return client

    def of(self, context: GrpcContext) -> GrpcClient:
        """Return the client of a call, which lives. It is added without settings if it is unknown.

        After a restart of the server a client may receive messages for minutes before it sends its settings again.

        Raises:
            GrpcRefusedError: The client with this ID belongs to another account.
            RefusedError: The connection has too many clients.
        """
        caller = context.caller
        with self._lock:
            client = self._clients.get(context.client_id)
            if client is not None and client.access_key != caller.account:
                raise _other_account(context)
            if client is None:
                self._core.limits.grpc_clients.take(caller.owner)
                client = self._clients[context.client_id] = GrpcClient(
                    context.client_id,
                    context.language,
                    caller.version,
                    caller.account,
                    caller.connection.remote,
                    caller.owner,
                    self._clock.steady_ms(),
                    self,
                )
            client.last_update_ms = self._clock.steady_ms()
        return client

    def _register_producer(self, client: GrpcClient, topics: frozenset[str]) -> None:
        for topic in client.producer_topics - topics:
            self._core.clients.unregister_producer(topic, client.id)
        client.producer_topics = topics
        self._refresh(client, topics, [], without_sub=True)

    def _register_consumer(self, client: GrpcClient, group: str, subscriptions: list[GrpcSubscription]) -> None:
        if client.group not in (None, group):
            self._core.clients.unregister_consumer(client.group or "", client.id)
        client.group = group
        self._refresh(client, (), [_consumer(client, group, subscriptions)], without_sub=False)

    def _refresh(
        self,
        client: GrpcClient,
        topics: frozenset[str] | tuple[()],
        consumers: list[GrpcConsumer],
        *,
        without_sub: bool,
    ) -> None:
        registered = self._core.registration.register(client, topics, consumers, without_sub=without_sub)
        if registered.refusals:
            raise registered.refusals.pop(0)

    def attach(self, context: GrpcContext, answer: bytes) -> None:
        """Send the answer to settings, and use its stream for commands to the client. An older one ends."""
        client = self._clients.get(context.client_id)
        if client is None:  # it has left meanwhile
            context.call.finish()
            return
        older = client.attach(context.call, answer)
        if older is not None:
            older.finish()
        if not context.call.is_open or not client.is_open:  # one of both has ended before the stream was attached
            client.detach(context.call)
            context.call.finish()

    def detach(self, context: GrpcContext) -> None:
        """Use the stream of a call no longer: it is closed."""
        client = self._clients.get(context.client_id)
        if client is not None and client.detach(context.call) is not None:
            self._leaving(client.client_id)

    # --- heartbeats and ends -------------------------------------------------------------------

    def heartbeat(self, context: GrpcContext, group: str) -> None:
        """Keep a client in its groups, and its messages invisible.

        Args:
            group: The group in the heartbeat of a consumer. The client is in the group of its settings.

        Raises:
            GrpcRefusedError: It has sent no settings, or is of a kind that the server does not know.
            RefusedError: Its group cannot be joined any more.
        """
        client = self._known(context)
        if client.settings.HasField("publishing"):
            self._refresh(client, client.producer_topics, [], without_sub=True)
        elif client.kind in CONSUMER_TYPES and client.group is not None:
            check_group_name(group)
            self._pop.keep_session(client.client_id)
            self._refresh(client, (), [_consumer(client, client.group, [])], without_sub=True)
        else:
            raise GrpcRefusedError(
                Code.UNRECOGNIZED_CLIENT_TYPE,
                f"clients of type {client.kind} are not served; use a producer, a push consumer or a simple consumer",
            )

    def queried_assignment(self, context: GrpcContext) -> None:
        """Note that a push consumer queries its assignment. If it does so no more, end its receives: it closes.

        It terminates only after their end. If it does live, it repeats a receive that was answered.
        """
        client = self._clients.get(context.client_id)
        if client is not None and client.kind == ClientType.PUSH_CONSUMER:
            if client.assignment_timer is not None:
                client.assignment_timer.cancel()
            client.assignment_timer = self.call_later(_ASSIGNMENT_MS, partial(self._leaving, client.client_id))

    def terminate(self, context: GrpcContext) -> None:
        """End a client that leaves.

        Raises:
            GrpcRefusedError: It has sent no settings.
        """
        self.end(self._known(context))

    def _known(self, context: GrpcContext) -> GrpcClient:
        client = self.find(context)
        if client is not None:
            client.last_update_ms = self._clock.steady_ms()
        if client is None or client.settings is None:
            raise GrpcRefusedError(
                Code.UNRECOGNIZED_CLIENT_TYPE,
                f"cannot find client settings of {context.client_id!r}; send them on the telemetry stream",
            )
        return client

    def end(self, client: GrpcClient) -> None:
        """Remove a client from its groups, end its stream, and release its messages."""
        with self._lock:
            if self._clients.get(client.client_id) is not client:
                return
            del self._clients[client.client_id]
            client.is_open = False
        stream = client.detach()
        if client.assignment_timer is not None:
            client.assignment_timer.cancel()
        self._core.limits.grpc_clients.give(client.owner)
        if stream is not None:
            stream.finish()
        self._leaving(client.client_id)
        self._pop.end_session(client.client_id)
        self._core.clients.forget(client.id)  # the last: it notifies other clients, which may fail

    def sweep(self) -> None:
        """End the clients that have sent nothing for too long; those in no group too."""
        limit_ms = self._clock.steady_ms() - self._expire_ms
        for client in list(self._clients.values()):
            if client.last_update_ms < limit_ms:
                client.close("no heartbeat")


def _consumer(client: GrpcClient, group: str, subscriptions: list[GrpcSubscription]) -> GrpcConsumer:
    is_push = client.kind == ClientType.PUSH_CONSUMER
    return GrpcConsumer(
        group_name=group,
        consume_type="CONSUME_PASSIVELY" if is_push else "CONSUME_ACTIVELY",
        subscription_data_set=subscriptions,
    )


def _other_account(context: GrpcContext) -> GrpcRefusedError:
    return GrpcRefusedError(
        Code.UNAUTHORIZED,
        f"client ID {context.client_id[:64]!r} is in use by another account; give this client another ID",
    )


def status_command(status: Any) -> bytes:
    """Return a command that only has a status."""
    return bytes(protos.TelemetryCommand(status=status).SerializeToString())
