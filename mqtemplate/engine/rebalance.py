"""Assignment of the queues of a topic to the members of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
