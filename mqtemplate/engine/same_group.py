"""Check that the members of a group have the same subscriptions and message model."""

from __future__ import annotations

from mqtemplate.broker import ConsumerSpec
from mqtemplate.errors import ListenerError


def check_same_group(one: ConsumerSpec, other: ConsumerSpec) -> None:
    """Check that two members may share a group.

    Raises:
        ListenerError: Their subscriptions or message models differ. In RocketMQ the last member would win, and the
            others would lose messages.
    """
    if one.subscriptions != other.subscriptions:
        raise ListenerError(
            f"group {one.group!r} subscribes to {_describe(one)} and to {_describe(other)}; the members of a group "
            "share one subscription, since each gets a part of the queues. Give the second listener a group of its own"
        )
    if one.message_model is not other.message_model:
        raise ListenerError(
            f"group {one.group!r} has members with {one.message_model.value} and with {other.message_model.value}; "
            "choose one, or give the second listener a group of its own"
        )


def _describe(spec: ConsumerSpec) -> str:
    return ", ".join(f"{topic}:{selector.expression}" for topic, selector in sorted(spec.subscriptions.items()))
