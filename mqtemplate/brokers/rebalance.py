"""How the queues of a topic are shared out among the members of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqtemplate.message import MessageQueue


def in_javas_order(members: Iterable[str]) -> list[str]:
    """Client ids as Java sorts texts, by UTF-16 units; all members must sort them alike."""
    return sorted(members, key=lambda member: member.encode("utf-16-be", "surrogatepass"))


def allocate_averagely(member: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """The queues of *member*: neighbours stay together; where it does not come out even the first members get one more.

    Both sequences are sorted alike by everybody, so all members come to the same answer without talking.
    Source: ``AllocateMessageQueueAveragely``.
    """
    if member not in members:
        return []
    index, count = members.index(member), len(members)
    share, rest = divmod(len(queues), count)
    start = index * share + min(index, rest)
    return list(queues[start : start + share + (index < rest)])
