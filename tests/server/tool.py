"""A client of a server: it sends the requests of ``mqadmin``, of producers and of consumers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import HostAddress
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import CURRENT_VERSION, RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.message import (
    PullMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import encode_properties_text
from mqtemplate.remoting.settings import RemotingClientSettings

TIMEOUT_MS = 10_000
ANY_PORT = HostAddress("127.0.0.1", 0)


def make_engine(clock: VirtualClock, path: Path | None = None) -> EmbeddedBroker:
    """Return an engine with small index files. Its server reports the port that the operating system chose."""
    settings = EmbeddedSettings(listen_host=ANY_PORT, max_hash_slot_num=1_000, max_index_num=4_000)
    return EmbeddedBroker(path, settings, clock)


HeaderT = TypeVar("HeaderT", SendMessageRequestHeader, SendMessageRequestHeaderV2)


def send_header(
    topic: str,
    queue_id: int = 0,
    *,
    properties: Mapping[str, str] | str = "",
    kind: type[HeaderT] = SendMessageRequestHeaderV2,  # type: ignore[assignment]
    **fields: Any,
) -> HeaderT:
    """Return the header of a send as Java's producer writes it."""
    usual: dict[str, Any] = {
        "producer_group": "producers",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "flag": 0,
        "properties": properties if isinstance(properties, str) else encode_properties_text(properties),
    }
    return kind(topic=topic, queue_id=queue_id, **usual | fields)


def pull_header(
    topic: str, queue_offset: int = 0, *, group: str = "billing", queue_id: int = 0, **fields: Any
) -> PullMessageRequestHeader:
    """Return the header of a pull as Java's consumer writes it. The subscription is in the request."""
    usual: dict[str, Any] = {
        "max_msg_nums": 32,
        "sys_flag": PullSysFlag.SUBSCRIPTION,
        "commit_offset": 0,
        "suspend_timeout_millis": 15_000,
        "sub_version": 1,
    }
    return PullMessageRequestHeader(
        consumer_group=group, topic=topic, queue_id=queue_id, queue_offset=queue_offset, **usual | fields
    )


def heartbeat_body(client_id: str, group: str, *subscriptions: SubscriptionData, **consumer: Any) -> bytes:
    """Return the heartbeat of a client with one consumer."""
    data = ConsumerData(group_name=group, subscription_data_set=list(subscriptions), **consumer)
    return HeartbeatData(client_id=client_id, consumer_data_set=[data]).encode()


class Tool:
    """One connection to one address.

    Args:
        on_request: Responds to requests of the server.
    """

    def __init__(
        self,
        address: HostAddress,
        credentials: Credentials | None = None,
        on_request: Callable[[Connection, RemotingCommand], RemotingCommand | None] | None = None,
    ) -> None:
        self.address = str(address)
        self._client = RemotingClient(RemotingClientSettings(credentials=credentials), SystemClock(), on_request)

    def request(
        self, code: int, header: CommandHeader | None = None, body: bytes = b"", *, version: int = CURRENT_VERSION
    ) -> RemotingCommand:
        """Return the response, of any code."""
        request = RemotingCommand.request(code, header, body)
        request.version = version
        return self.send_request(request)

    def send_request(self, request: RemotingCommand) -> RemotingCommand:
        """Return the response to a prepared request."""
        return self._client.invoke(self.address, request, TIMEOUT_MS)

    def request_ok(self, code: int, header: CommandHeader | None = None, body: bytes = b"") -> RemotingCommand:
        """Return the response, which must be SUCCESS."""
        response = self.request(code, header, body)
        assert response.code == ResponseCode.SUCCESS, f"{response}"
        return response

    def send(
        self, topic: str, body: bytes = b"hello", queue_id: int = 0, *, keys: str = "", delay_level: int = 0
    ) -> RemotingCommand:
        """Send one message, as Java's producer does. The response must be SUCCESS."""
        response = self.send_any(topic, body, queue_id, keys=keys, delay_level=delay_level)
        assert response.code == ResponseCode.SUCCESS, f"{response}"
        return response

    def send_any(
        self, topic: str, body: bytes = b"hello", queue_id: int = 0, *, keys: str = "", delay_level: int = 0
    ) -> RemotingCommand:
        """Send one message, and return the response, of any code."""
        properties = {"KEYS": keys, "DELAY": str(delay_level) if delay_level else ""}
        given = {name: value for name, value in properties.items() if value}
        header = send_header(topic, queue_id, born_timestamp=SystemClock().now_ms(), properties=given)
        return self.request(RequestCode.SEND_MESSAGE_V2, header, body)

    def consume(self, group: str, *topics: str, client_id: str = "consumer-1") -> None:
        """Join a group."""
        subscriptions = [SubscriptionData(topic=topic, sub_version=1) for topic in topics]
        self.request_ok(RequestCode.HEART_BEAT, body=heartbeat_body(client_id, group, *subscriptions))

    def produce(self, group: str, client_id: str = "producer-1") -> None:
        """Register as a producer of a group."""
        heartbeat = HeartbeatData(client_id=client_id, producer_data_set=[ProducerData(group_name=group)])
        self.request_ok(RequestCode.HEART_BEAT, body=heartbeat.encode())

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
