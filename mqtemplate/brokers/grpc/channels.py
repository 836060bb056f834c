"""Connections to a proxy: grpcio's channels, the metadata of each request, and failures as errors of this library.

Source: RocketMQ ``client-java: Signature``, ``RpcClientImpl``, ``StatusChecker``.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mqtemplate.brokers.grpc.settings import Endpoints, GrpcSettings
from mqtemplate.brokers.remote.cluster.failures import Outages
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerClosedError,
    BrokerError,
    ConfigurationError,
    DelayError,
    DestinationError,
    InvalidReceiptHandleError,
    MessageError,
    MQTemplateError,
    RemoteConnectError,
    RemoteProtocolError,
    RemoteTimeoutError,
    SendError,
    UnsupportedError,
)
from mqtemplate.extras import install_command
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.remoting.identity import ClientTls

try:
    import grpc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"rocketmq.endpoints needs grpcio ({error}); {install_command('grpc')}", name=error.name
    ) from error

RpcError: Any = grpc.RpcError
"""Error of grpcio for a request that failed. It is also a call, with a code."""

# --- failures -------------------------------------------------------------------------------------


_ADVICE = {
    Code.TOPIC_NOT_FOUND: "an administrator creates topics: mqadmin updateTopic -c CLUSTER -t TOPIC -a "
    "+message.type=NORMAL (or FIFO, DELAY, TRANSACTION)",
    Code.CONSUMER_GROUP_NOT_FOUND: "an administrator creates groups: mqadmin updateSubGroup -c CLUSTER -g GROUP",
    Code.UNAUTHORIZED: "check access-key and secret-key, and the rights of the account",
    Code.FORBIDDEN: "the permission of the topic, or access control, forbids it",
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: "a topic has one type of messages; use a topic of the type of the "
    "message (DELAY with a delay, FIFO with a hash_key, TRANSACTION, else NORMAL), or let an administrator change it: "
    "mqadmin updateTopic -t TOPIC -a +message.type=...",
    Code.ILLEGAL_DELIVERY_TIME: "the limits are the proxy's maxDelayTimeMills (1 day by default) and the broker's "
    "timerMaxDelaySec (3 days by default)",
    Code.ILLEGAL_INVISIBLE_TIME: "a proxy takes 10 s to 12 h for received messages, and up to 12 h for a change",
    Code.TOO_MANY_REQUESTS: "it is overloaded; try again later",
    Code.ILLEGAL_FILTER_EXPRESSION: "write the selector in the syntax of the broker, and set enablePropertyFilter=true "
    "there for SQL92",
}
_KINDS: dict[int, type[BrokerError]] = {
    Code.TOO_MANY_REQUESTS: BrokerBusyError,
    Code.NOT_IMPLEMENTED: UnsupportedError,
    Code.UNSUPPORTED: UnsupportedError,
    Code.VERSION_UNSUPPORTED: UnsupportedError,
    Code.INVALID_RECEIPT_HANDLE: InvalidReceiptHandleError,
    Code.PROXY_TIMEOUT: RemoteTimeoutError,
    Code.REQUEST_TIMEOUT: RemoteTimeoutError,
}
_SEND_KINDS: dict[int, type[MQTemplateError]] = {
    Code.ILLEGAL_TOPIC: DestinationError,
    Code.TOPIC_NOT_FOUND: DestinationError,
    Code.ILLEGAL_MESSAGE_TAG: MessageError,
    Code.ILLEGAL_MESSAGE_KEY: MessageError,
    Code.ILLEGAL_MESSAGE_GROUP: MessageError,
    Code.ILLEGAL_MESSAGE_PROPERTY_KEY: MessageError,
    Code.ILLEGAL_MESSAGE_ID: MessageError,
    Code.ILLEGAL_DELIVERY_TIME: DelayError,
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: MessageError,
    Code.MESSAGE_CORRUPTED: MessageError,
    Code.MESSAGE_BODY_TOO_LARGE: MessageError,
    Code.MESSAGE_BODY_EMPTY: MessageError,
    Code.MESSAGE_PROPERTIES_TOO_LARGE: MessageError,
    Code.BAD_REQUEST: MessageError,
    Code.NOT_IMPLEMENTED: UnsupportedError,
    Code.UNSUPPORTED: UnsupportedError,
    Code.VERSION_UNSUPPORTED: UnsupportedError,
}
_NOT_SENT = ("failed to connect", "connections to all backends", "name resolution", "DNS resolution")
"""Parts of grpcio's text for a request that did not leave this process."""


def refusal_text(status: Any, address: object) -> str:
    """Return the address that answered, its status, and advice."""
    try:
        name = f"{status.code} {Code(status.code).name}"
    except ValueError:
        name = str(status.code)
    advice = _ADVICE.get(status.code)
    return f"{address} answered {name}: {status.message or 'no reason'}{'' if advice is None else f'; {advice}'}"


def check_status(status: Any, operation: str, address: object) -> None:
    """Return if a status is OK.

    Raises:
        BrokerError: It is not; its class tells whether a retry can help.
    """
    if status.code != Code.OK:
        kind = _KINDS.get(status.code, BrokerError)
        raise kind.during(operation, refusal_text(status, address))


def send_error(status: Any, operation: str, address: object) -> MQTemplateError:
    """Return the error for a refused message: `MessageError` if a retry cannot help, else `SendError`."""
    return _SEND_KINDS.get(status.code, SendError).during(operation, refusal_text(status, address))


def is_invalid_argument(failure: Any) -> bool:
    """Return True if the peer refused the arguments of a request that grpcio reports as failed."""
    return failure.code() is grpc.StatusCode.INVALID_ARGUMENT


def is_cancelled(failure: Any) -> bool:
    """Return True if this client ended a request before its answer."""
    return failure.code() is grpc.StatusCode.CANCELLED


def rpc_error(failure: Any, operation: str, address: object, timeout_ms: int) -> BrokerError:
    """Return the error for a request that grpcio reports as failed.

    Args:
        failure: A ``grpc.RpcError`` that is also a call.
    """
    code, details = failure.code(), (failure.details() or "").strip()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RemoteTimeoutError.during(operation, f"no answer from {address} in {timeout_ms} ms")
    if code is grpc.StatusCode.UNAVAILABLE:
        was_sent = not any(text in details for text in _NOT_SENT)
        reason = "the connection was lost" if was_sent else "no connection"
        return RemoteConnectError(f"{operation}: {address}: {reason}: {details}", was_sent=was_sent)
    if code is grpc.StatusCode.CANCELLED:
        return BrokerClosedError.during(operation, f"the request to {address} was cancelled, since the client closes")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError.during(
            operation,
            f"{address} does not have this request of RocketMQ's gRPC protocol ({details}); if it is not the gRPC port "
            "of a proxy, correct rocketmq.endpoints",
        )
    return RemoteProtocolError.during(operation, f"{address} answered gRPC status {code.name}: {details}")


# --- metadata -------------------------------------------------------------------------------------


_ALGORITHM = "MQv2-HMAC-SHA1"
_CLIENT_VERSION = "5.2.0"  # of the protocol: proxies compare it with the versions of RocketMQ's own clients


def request_metadata(
    settings: GrpcSettings, client_id: str, now: datetime | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the metadata of one request, with its signature if there are credentials."""
    date_time = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    found = [
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-client-version", _CLIENT_VERSION),
        ("x-mq-request-id", str(uuid.uuid4())),
        ("x-mq-date-time", date_time),
    ]
    if settings.namespace:
        found.append(("x-mq-namespace", settings.namespace))
    if (credentials := settings.credentials) is not None:
        signature = hmac.new(credentials.secret_key.encode(), date_time.encode(), hashlib.sha1).hexdigest().upper()
        signed = f"Credential={credentials.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
        found.append(("authorization", f"{_ALGORITHM} {signed}"))
        if credentials.security_token is not None:
            found.append(("x-mq-session-token", credentials.security_token))
    return tuple(found)


# --- TLS ------------------------------------------------------------------------------------------


def _secure_channel(tls: ClientTls, endpoints: Endpoints, options: list[tuple[str, Any]]) -> Any:
    """Return a channel over TLS.

    Raises:
        ConfigurationError: A file cannot be read.
        UnsupportedError: The private key has a password, which grpcio cannot use.
    """
    if tls.key_password is not None:
        raise UnsupportedError(
            "over gRPC the private key of a client must have no password; store it without one (openssl pkey -in KEY "
            "-out NEW), readable only for this user, and leave the password out"
        )
    certificate = None if tls.cert_path is None else _read(tls.cert_path)
    key = None if tls.key_path is None else _read(tls.key_path)
    roots = _read(tls.trust_cert_path) if tls.trust_cert_path is not None else _trusted_by_this_machine()
    if tls.insecure or not tls.check_host_name:
        presented = _presented(endpoints)
        roots = presented if tls.insecure else roots
        if (name := _name_in(presented, endpoints)) is not None:
            options = [*options, ("grpc.ssl_target_name_override", name)]
    credentials = grpc.ssl_channel_credentials(roots, key, certificate)
    return grpc.secure_channel(endpoints.target, credentials, options)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigurationError(
            f"the TLS file {path} cannot be read: {exc}; correct the path or its permission"
        ) from exc


def _trusted_by_this_machine() -> bytes | None:
    path: str | None = ssl.get_default_verify_paths().cafile
    return _read(path) if path else None  # grpcio has a list of its own for None


def _presented(endpoints: Endpoints) -> bytes:
    """Return the certificate that the proxy shows, as PEM."""
    host, port = endpoints.addresses[0]
    try:
        return ssl.get_server_certificate((host, port), timeout=3.0).encode()
    except OSError as exc:
        raise RemoteConnectError(f"{endpoints}: no TLS connection: {exc}") from exc


def _name_in(certificate: bytes, endpoints: Endpoints) -> str | None:
    """Return a name that a certificate is valid for; None if it has none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate.decode())
    try:
        with (
            socket.create_connection(endpoints.addresses[0], 3.0) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            names: Any = (wrapped.getpeercert() or {}).get("subjectAltName", ())
    except OSError:  # grpcio reports why the connection fails
        return None
    return next((str(value) for kind, value in names if kind in ("DNS", "IP Address")), None)


# --- channels -------------------------------------------------------------------------------------


_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 300_000),  # a server may close a connection that pings more often
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 0),  # the producer retries
    ("grpc.use_local_subchannel_pool", 1),  # each client has connections of its own
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # time limit of a connection attempt
]


class Channels:
    """Channels of one client, by endpoints. A channel connects with its first request, and again after a loss.

    Args:
        outages: Log of proxies that do not answer.
    """

    def __init__(self, settings: GrpcSettings, outages: Outages) -> None:
        self._settings = settings
        self._outages = outages
        self._lock = threading.Lock()
        self._channels: dict[Endpoints, Any] = {}
        self._calls: dict[tuple[Endpoints, str, str], Any] = {}
        self._is_closed = False

    def call(
        self, endpoints: Endpoints, client_id: str, method: str, request: Any, operation: str, timeout_ms: int
    ) -> Any:
        """Send a request and return the answer, whatever its status.

        Args:
            operation: What the request is for, for errors.

        Raises:
            BrokerError: There is no answer.
        """
        call, seen = self._call_of(endpoints, "unary_unary", method), self._outages.changes
        try:
            answer = call(request, timeout=timeout_ms / 1_000, metadata=request_metadata(self._settings, client_id))
        except grpc.RpcError as exc:
            error = rpc_error(exc, operation, endpoints, timeout_ms)
            self._outages.report(str(endpoints), error, seen, timeout_ms)
            raise error from exc
        self._outages.report(str(endpoints), None, seen)
        return answer

    def call_async(
        self,
        endpoints: Endpoints,
        client_id: str,
        method: str,
        request: Any,
        operation: str,
        timeout_ms: int,
        done: Callable[[Any], None],
    ) -> None:
        """Send a request. *done* is called with the answer, or with a `BrokerError`, in a thread of grpcio."""

        def ended(future: Any) -> None:
            try:
                answer, error = future.result(), None
            except grpc.RpcError as exc:
                answer = error = rpc_error(exc, operation, endpoints, timeout_ms)
            except grpc.FutureCancelledError:
                answer = error = BrokerClosedError.during(operation, "the client was closed before the answer")
            self._outages.report(str(endpoints), error, seen, timeout_ms)
            done(answer)

        call, seen = self._call_of(endpoints, "unary_unary", method), self._outages.changes
        metadata = request_metadata(self._settings, client_id)
        call.future(request, timeout=timeout_ms / 1_000, metadata=metadata).add_done_callback(ended)

    def stream(
        self, endpoints: Endpoints, client_id: str, method: str, request: Any, timeout_ms: int | None = None
    ) -> Any:
        """Start a request with a stream of answers, and return grpcio's call: an iterator with ``cancel``.

        Args:
            request: One request, or an iterator of requests for a method that takes a stream.
        """
        kind = "stream_stream" if hasattr(request, "__next__") else "unary_stream"
        timeout_s = None if timeout_ms is None else timeout_ms / 1_000
        metadata = request_metadata(self._settings, client_id)
        return self._call_of(endpoints, kind, method)(request, timeout=timeout_s, metadata=metadata)

    def _call_of(self, endpoints: Endpoints, kind: str, method: str) -> Any:
        key = endpoints, kind, method
        found = self._calls.get(key)
        if found is None:
            with self._lock:
                if self._is_closed:
                    raise BrokerClosedError(f"the client of {endpoints} is closed; start it again")
                name = "TelemetryCommand" if method == "Telemetry" else f"{method}Response"
                answer_type = getattr(protos, name)
                found = getattr(self._channel(endpoints), kind)(
                    protos.method_path(method),
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=answer_type.FromString,
                )
                self._calls[key] = found
        return found

    def _channel(self, endpoints: Endpoints) -> Any:
        found = self._channels.get(endpoints)
        if found is None:
            tls = self._settings.tls
            if tls is None:
                found = grpc.insecure_channel(endpoints.target, _OPTIONS)
            else:
                found = _secure_channel(tls, endpoints, _OPTIONS)
            self._channels[endpoints] = found
        return found

    def close(self) -> None:
        """Close all connections; requests that run end with an error."""
        with self._lock:
            self._is_closed = True
            channels, self._channels, self._calls = list(self._channels.values()), {}, {}
        for channel in channels:
            channel.close()
