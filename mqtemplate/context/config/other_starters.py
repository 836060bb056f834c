"""Keys of the other starter of rocketmq-spring, which speaks gRPC: what to write here instead."""

from __future__ import annotations

from mqtemplate.context.config.relaxed_keys import canonical_key

_GRPC = "it is a key of rocketmq-v5-client-spring-boot, which speaks gRPC with a proxy; here"
_HINTS = {
    # Source: rocketmq-spring, rocketmq-v5-client-spring-boot: RocketMQProperties
    "rocketmq.producer.endpoints": "set rocketmq.name-server to the address of a name server",
    "rocketmq.producer.topic": "each send names its topic",
    "rocketmq.producer.request-timeout": "set rocketmq.producer.send-message-timeout",
    "rocketmq.producer.max-attempts": "set rocketmq.producer.retry-times-when-send-failed",
    "rocketmq.producer.ssl-enabled": "set rocketmq.producer.tls-enable",
    "rocketmq.simple-consumer": "set rocketmq.pull-consumer, for receive()",
    "rocketmq.push-consumer": "write @message_listener, and set rocketmq.name-server",
}
_BY_NAME = {canonical_key(name): hint for name, hint in _HINTS.items()}


def hint_for(name: str) -> str | None:
    """Return what to write instead of a key, given with dots; None for a key that the other starter does not have."""
    hint = _BY_NAME.get(canonical_key(name))
    return None if hint is None else f"{_GRPC} {hint}"
