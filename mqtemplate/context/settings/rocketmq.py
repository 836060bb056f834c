"""``rocketmq.*``: the keys that rocketmq-spring has, with its defaults."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Self

from pydantic import Field, model_validator

from mqtemplate.broker import MessageModel
from mqtemplate.context.settings.properties import (
    ContradictionError,
    OptionalSecret,
    OptionalText,
    Properties,
    UpperCase,
)
from mqtemplate.selectors.tags import SelectorType


class AccessChannel(Enum):
    """Where a cluster runs: on own machines, or at a provider."""

    LOCAL = "LOCAL"
    CLOUD = "CLOUD"


class ClientSettings(Properties):
    """What producers and consumers have in common: who they are, and how they reach a cluster."""

    namespace: OptionalText = None
    """Prefix that keeps the topics and groups of several users of one cluster apart, the older form."""
    namespace_v2: OptionalText = None
    """The newer form, known to the cluster itself. Not together with ``namespace``."""
    access_key: OptionalSecret = None
    """Name of the account on a cluster with access control."""
    secret_key: OptionalSecret = None
    """Its secret."""
    enable_msg_trace: bool = False
    """Write a trace of each message into the trace topic."""
    customized_trace_topic: str = "RMQ_SYS_TRACE_TOPIC"
    """The topic for traces."""
    tls_enable: bool = False
    """Talk to the cluster over TLS."""
    instance_name: str = "DEFAULT"
    """Tells two clients of one process apart; in a broadcasting group, whose progress to go on with."""

    @model_validator(mode="after")
    def _check_client(self) -> Self:
        if self.namespace and self.namespace_v2:
            raise ContradictionError(
                "says the same as 'namespace' in a newer form; keep one of the two", "namespace_v2", "namespace"
            )
        if (self.access_key is None) != (self.secret_key is None):
            given, absent = ("access", "secret") if self.access_key else ("secret", "access")
            raise ContradictionError(f"needs '{absent}-key' beside it; give both or none", f"{given}_key")
        return self


class ProducerSettings(ClientSettings):
    """What the template sends as."""

    group: OptionalText = None
    """The producer group: under this name a cluster knows the sender, and asks it about transactions."""
    send_message_timeout: int = Field(3_000, gt=0)
    """Milliseconds for one call of a send verb, if the call does not say otherwise; retries are part of it."""
    compress_message_body_threshold: int = Field(4_096, ge=0)
    """Bytes from which a client compresses a body before it travels."""
    retry_times_when_send_failed: int = Field(2, ge=0)
    """How often ``sync_send`` tries again on another broker."""
    retry_times_when_send_async_failed: int = Field(2, ge=0)
    """The same for ``async_send``."""
    retry_next_server: bool = False
    """Try another broker also when one answered that it did not store the message."""
    max_message_size: int | None = Field(None, gt=0)
    """Bytes a body may have here, if that is less than what the broker takes."""


class _Reading(ClientSettings):
    group: OptionalText = None
    """The consumer group."""
    topic: OptionalText = None
    """The topic to read."""
    message_model: Annotated[MessageModel, UpperCase] = MessageModel.CLUSTERING
    """CLUSTERING shares the messages out among the group, BROADCASTING gives each member all."""
    selector_type: Annotated[SelectorType, UpperCase] = SelectorType.TAG
    """How ``selector-expression`` is to be read."""
    selector_expression: str = "*"
    """Which messages: tags joined by two bars, or ``*`` for all."""
    pull_batch_size: int = Field(10, gt=0, le=1_024)
    """How many messages one call asks for."""


class PullConsumerSettings(_Reading):
    """What ``template.receive`` reads. It needs ``group`` and ``topic``."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.group is None) != (self.topic is None):
            given, absent = ("group", "topic") if self.group else ("topic", "group")
            raise ContradictionError(f"needs '{absent}' beside it: receive() reads one topic for one group", given)
        return self


class ConsumerSettings(_Reading):
    """What holds for the listeners."""

    listeners: dict[str, dict[str, bool]] = Field(default_factory=dict)
    """Whether the listener of that group on that topic is started."""

    def is_listener_enabled(self, group: str, topic: str) -> bool:
        return self.listeners.get(group, {}).get(topic, True)


class RocketMQSettings(Properties):
    """The broker to use, and how to use it."""

    name_server: str = Field("embedded", min_length=1)
    """Which broker: ``embedded`` keeps its files in ``mqtemplate.broker.store-path``, ``embedded:./data`` in that
    folder, ``embedded:memory`` keeps nothing. ``host:port;host:port`` is for a RocketMQ cluster."""
    access_channel: Annotated[AccessChannel | None, UpperCase] = None
    """Whether the cluster is an own one (LOCAL) or a provider's (CLOUD)."""
    producer: ProducerSettings = ProducerSettings()
    consumer: ConsumerSettings = ConsumerSettings()
    pull_consumer: PullConsumerSettings = PullConsumerSettings()
