"""Rules that all members of a group follow: they subscribe to the same, and share the queues in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqtemplate.broker import ConsumerSpec
from mqtemplate.errors import ListenerError
from mqtemplate.message import MessageQueue


def sort_client_ids(client_ids: Iterable[str]) -> list[str]:
    """Return client ids in the order of Java, by UTF-16 code units. All members of a group must use the same order."""
    return sorted(client_ids, key=lambda client_id: client_id.encode("utf-16-be", "surrogatepass"))


def allocate_averagely(member: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return the queues of *member*: a contiguous range of *queues*, one queue longer for the first members.

    Each member computes the assignment by itself, so all members must sort both sequences in the same way.
    Source: ``AllocateMessageQueueAveragely``.
    """
    if member not in members:
        return []
    index, count = members.index(member), len(members)
    share, rest = divmod(len(queues), count)
    start = index * share + min(index, rest)
    return list(queues[start : start + share + (index < rest)])


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
