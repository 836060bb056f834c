"""Members in Python and in Java are one group: they share the queues, and each takes over when the other is killed."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.peer.java_client import JavaClient
from tests.conformance.java_clients import Case
from tests.conformance.python_member import PythonMember

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_PATIENCE_MS = 45_000


def _send(case: Case, topic: str, text: str) -> list[bytes]:
    """Five messages for each of the four queues."""
    messages = [{"topic": topic, "body": f"{text} {number}".encode(), "queue_id": number % 4} for number in range(20)]
    case.client.send(*messages)
    return [f"{text} {number}".encode() for number in range(20)]


def _done(client: JavaClient, member: str, begins: str, count: int) -> list[bytes]:
    return [message.body for message in client.handled(member, count, _PATIENCE_MS, begins=begins)]


def test_java_takes_over_from_a_killed_member_in_python(case: Case) -> None:
    topic, group = case.topic("mixed-python-dies"), case.group("mixed-python-dies")
    case.tools.create_topic(topic)
    java = case.client.join(group, topic)
    with PythonMember(case.server.address, group, topic) as python:
        shares = [python.queues(2, _PATIENCE_MS), case.client.assigned(java, topic, 2, _PATIENCE_MS)]
        both = _send(case, topic, "both")
        halves = [python.handled("both", 10, _PATIENCE_MS), _done(case.client, java, "both", 10)]

        python.kill()

        assert case.client.assigned(java, topic, 4, _PATIENCE_MS) == [0, 1, 2, 3]
        alone = _send(case, topic, "alone")
        handled = _done(case.client, java, "alone", 20)
    case.client.leave(java)
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert Counter(halves[0] + halves[1]) == Counter(both)
    assert Counter(handled) == Counter(alone)


def test_python_takes_over_from_a_killed_member_in_java(case: Case) -> None:
    topic, group = case.topic("mixed-java-dies"), case.group("mixed-java-dies")
    case.tools.create_topic(topic)
    with PythonMember(case.server.address, group, topic) as python, JavaClient(case.server, case.version) as other:
        java = other.join(group, topic)
        shares = [python.queues(2, _PATIENCE_MS), other.assigned(java, topic, 2, _PATIENCE_MS)]
        both = _send(case, topic, "both")
        halves = [python.handled("both", 10, _PATIENCE_MS), _done(other, java, "both", 10)]

        other.kill()

        assert python.queues(4, _PATIENCE_MS) == [0, 1, 2, 3]
        alone = _send(case, topic, "alone")
        handled = python.handled("alone", 20, _PATIENCE_MS)
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert Counter(halves[0] + halves[1]) == Counter(both)
    assert Counter(handled) == Counter(alone)
