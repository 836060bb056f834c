"""Unmodified Java clients of RocketMQ consume: push, orderly, broadcasting, filters, retries, lite pull."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from bench.peer.java_client import JavaClient
from tests.conformance.java_clients import Case

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TIMEOUT_MS = 30_000


def _messages(topic: str, count: int, **more: object) -> list[dict[str, object]]:
    return [{"topic": topic, "body": b"%d" % number, "queue_id": number % 4} | more for number in range(count)]


def _bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_a_group_consumes_each_message_once_and_continues_at_its_offset(case: Case) -> None:
    topic, group = case.topic("group"), case.group("group")
    case.client.send({"topic": topic, "body": b"first"})
    case.client.send(*_messages(topic, 40))

    handled = case.client.consume(group, topic, 41, _TIMEOUT_MS)
    case.client.send({"topic": topic, "body": b"second"})
    again = case.client.consume(group, topic, 1, _TIMEOUT_MS, linger=True)

    assert Counter(message.body for message in handled) == Counter([b"first", *_bodies(40)])
    assert [message.body for message in again] == [b"second"]


def test_a_held_pull_returns_when_messages_arrive(case: Case) -> None:
    topic = case.topic("held")
    case.client.send({"topic": topic, "body": b"first"})
    member = case.client.join(case.group("held"), topic)
    case.client.handled(member, 1, _TIMEOUT_MS)
    assert case.client.assigned(member, topic, 4, _TIMEOUT_MS) == [0, 1, 2, 3]

    case.client.send(*_messages(topic, 8))

    handled = case.client.handled(member, 9, _TIMEOUT_MS)
    case.client.leave(member)
    assert sorted(message.body for message in handled) == sorted([b"first", *_bodies(8)])


def test_a_consumer_selects_by_tags(case: Case) -> None:
    topic = case.topic("tags")
    for tag in ("paid", "refunded", "open"):
        case.client.send(*_messages(topic, 4, tags=tag))
    case.client.send({"topic": topic, "body": b"no tag"})
    member = case.client.join(case.group("tags"), topic, tags="paid || refunded")

    handled = case.client.handled(member, 8, _TIMEOUT_MS)

    case.client.leave(member)
    assert Counter(message.tags for message in handled) == {"paid": 4, "refunded": 4}


def test_a_consumer_selects_by_sql92(case: Case) -> None:
    topic = case.topic("sql")
    for amount in range(12):
        properties = {"amount": str(amount), "currency": "EUR" if amount % 2 else "USD"}
        case.client.send({"topic": topic, "body": b"%d" % amount, "tags": "t", "properties": properties})
    expression = "amount BETWEEN 3 AND 8 AND currency IN ('EUR', 'CHF') AND TAGS = 't' AND missing IS NULL"

    member = case.client.join(case.group("sql"), topic, sql=expression)

    handled = case.client.handled(member, 3, _TIMEOUT_MS)
    case.client.leave(member)
    assert sorted(message.body for message in handled) == [b"3", b"5", b"7"]


def test_an_invalid_sql92_expression_is_refused(case: Case) -> None:
    topic = case.topic("invalid-sql")
    case.client.send({"topic": topic, "body": b"first"})

    with pytest.raises(Exception, match="CODE: 23"):
        case.client.join(case.group("invalid-sql"), topic, sql="amount > > 3")


def test_in_broadcasting_every_member_receives_all_messages(case: Case) -> None:
    topic, group = case.topic("broadcast"), case.group("broadcast")
    case.client.send({"topic": topic, "body": b"first"})
    members = [case.client.join(group, topic, broadcasting=True) for _ in range(2)]
    for member in members:
        assert case.client.assigned(member, topic, 4, _TIMEOUT_MS) == [0, 1, 2, 3]

    case.client.send(*_messages(topic, 12))

    for member in members:
        handled = case.client.handled(member, 13, _TIMEOUT_MS)
        assert Counter(message.body for message in handled) == Counter([b"first", *_bodies(12)])
        case.client.leave(member)


def test_members_share_the_queues_and_take_those_of_a_member_that_leaves(case: Case) -> None:
    topic, group = case.topic("shared"), case.group("shared")
    case.tools.create_topic(topic)
    members = [case.client.join(group, topic) for _ in range(2)]
    shares = [case.client.assigned(member, topic, 2, _TIMEOUT_MS) for member in members]

    case.client.send(*_messages(topic, 40))

    handled = [case.client.handled(member, 20, _TIMEOUT_MS) for member in members]
    case.client.leave(members[1])
    assert sorted(shares) == [[0, 1], [2, 3]]
    for share, messages in zip(shares, handled, strict=True):
        assert Counter(message.queue_id for message in messages) == dict.fromkeys(share, 10)
    assert case.client.assigned(members[0], topic, 4, _TIMEOUT_MS) == [0, 1, 2, 3]
    case.client.leave(members[0])


def test_another_member_takes_the_queues_of_a_killed_process(case: Case) -> None:
    """It receives the messages that the killed process did not consume."""
    topic, group = case.topic("killed"), case.group("killed")
    case.tools.create_topic(topic)
    remaining = case.client.join(group, topic)
    with JavaClient(case.server, case.version) as other:
        killed = other.join(group, topic)
        shares = [case.client.assigned(remaining, topic, 2, _TIMEOUT_MS), other.assigned(killed, topic, 2, _TIMEOUT_MS)]
        other.kill()

        case.client.send(*_messages(topic, 20))

        handled = case.client.handled(remaining, 20, _TIMEOUT_MS)
    case.client.leave(remaining)
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert Counter(message.body for message in handled) == Counter(_bodies(20))


def test_an_orderly_consumer_handles_each_key_in_order(case: Case) -> None:
    """A message that failed is retried before the next message of its queue."""
    topic = case.topic("ordered")
    case.client.send({"topic": topic, "body": b"first"})
    sent = [
        {"topic": topic, "body": f"{key} {number}".encode(), "hash_key": key} for number in range(10) for key in "abcd"
    ]
    case.client.send(*sent)

    member = case.client.join(case.group("ordered"), topic, orderly=True, threads=4, fail=[b"a 3", b"b 7"])

    case.client.handled(member, 41, _TIMEOUT_MS)
    received = case.client.handled(member, 43, _TIMEOUT_MS, failed=True)
    case.client.leave(member)
    by_key = defaultdict(list)
    for message in received:
        by_key[message.body[:1]].append(message.body)
    assert by_key[b"c"] == [b"c %d" % number for number in range(10)]
    assert by_key[b"d"] == [b"d %d" % number for number in range(10)]
    assert by_key[b"a"] == [b"a %d" % number for number in (0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9)]
    assert by_key[b"b"] == [b"b %d" % number for number in (0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9)]


def test_a_message_that_always_fails_is_retried_and_becomes_a_dead_letter(case: Case) -> None:
    """The retries have the delay level that the listener sets. The next message of its queue is not delayed."""
    topic, group = case.topic("fails"), case.group("fails")
    case.client.send({"topic": topic, "body": b"good"}, {"topic": topic, "body": b"bad", "tags": "t", "keys": "k"})

    member = case.client.join(group, topic, fail_always=[b"bad"], retry_level=1, max_reconsume_times=2)

    received = case.client.handled(member, 4, _TIMEOUT_MS, failed=True)
    [dead] = case.client.read(f"%DLQ%{group}", 1, _TIMEOUT_MS)
    case.client.leave(member)
    attempts = [message for message in received if message.body == b"bad"]
    times = [message.handled_timestamp or 0 for message in attempts]
    assert [message.reconsume_times for message in attempts] == [0, 1, 2]
    assert [(message.topic, message.tags, message.keys) for message in attempts] == [(topic, "t", "k")] * 3
    assert len({message.msg_id for message in attempts}) == 1
    assert min(after - before for before, after in pairwise(times)) >= 1_000
    assert [message.body for message in received if message.body != b"bad"] == [b"good"]
    assert (dead.body, dead.tags, dead.properties["RETRY_TOPIC"]) == (b"bad", "t", topic)


def test_a_request_receives_its_reply(case: Case) -> None:
    topic = case.topic("requests")
    case.client.send({"topic": topic, "body": b"first"})
    member = case.client.join(case.group("requests"), topic, reply="reply to ")
    assert case.client.assigned(member, topic, 4, _TIMEOUT_MS) == [0, 1, 2, 3]

    replies = [case.client.request({"topic": topic, "body": b"request %d" % number}, 20_000) for number in range(3)]

    case.client.leave(member)
    assert replies == [b"reply to request 0", b"reply to request 1", b"reply to request 2"]


def test_a_lite_pull_consumer_continues_at_its_committed_offset(case: Case) -> None:
    topic, group = case.topic("lite"), case.group("lite")
    case.client.send({"topic": topic, "body": b"first"})
    case.client.send(*_messages(topic, 20, tags="even"))

    first = case.client.lite_pull(group, topic, 21, _TIMEOUT_MS)
    case.client.send({"topic": topic, "body": b"second"})
    second = case.client.lite_pull(group, topic, 1, _TIMEOUT_MS)

    assert Counter(message.body for message in first) == Counter([b"first", *_bodies(20)])
    assert [message.body for message in second] == [b"second"]


@pytest.mark.thorough
def test_running_members_consume_again_after_an_offset_reset(newest: Case, older: Case) -> None:
    """The group has a member of each version."""
    topic, group = newest.topic("reset"), newest.group("reset")
    newest.tools.create_topic(topic)
    members = [(case.client, case.client.join(group, topic)) for case in (newest, older)]
    for client, member in members:
        client.assigned(member, topic, 2, _TIMEOUT_MS)
    newest.client.send(*_messages(topic, 8))
    for client, member in members:
        client.handled(member, 4, _TIMEOUT_MS)

    offsets = newest.tools.reset_offset(group, topic, 0)

    handled = []
    for client, member in members:
        handled += client.handled(member, 8, _TIMEOUT_MS)
        client.leave(member)
    assert offsets == dict.fromkeys(range(4), 0)
    assert Counter(message.body for message in handled) == dict.fromkeys(_bodies(8), 2)
