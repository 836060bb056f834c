"""Python and Java consumers in one group share the queues. When one is killed, the other receives its queues."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.peer.java_client import JavaClient
from tests.conformance.java_clients import Case
from tests.conformance.python_member import PythonMember

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TIMEOUT_MS = 45_000


def _send(case: Case, topic: str, text: str) -> list[bytes]:
    """Send five messages to each of the four queues."""
    messages = [{"topic": topic, "body": f"{text} {number}".encode(), "queue_id": number % 4} for number in range(20)]
    case.client.send(*messages)
    return [f"{text} {number}".encode() for number in range(20)]


def _handled(client: JavaClient, member: str, prefix: str, count: int) -> list[bytes]:
    return [message.body for message in client.handled(member, count, _TIMEOUT_MS, prefix=prefix)]


def test_a_java_consumer_takes_the_queues_of_a_killed_python_consumer(case: Case) -> None:
    topic, group = case.topic("mixed-python-killed"), case.group("mixed-python-killed")
    case.tools.create_topic(topic)
    java = case.client.join(group, topic)
    with PythonMember(case.server.address, group, topic) as python:
        shares = [python.queues(2, _TIMEOUT_MS), case.client.assigned(java, topic, 2, _TIMEOUT_MS)]
        both = _send(case, topic, "both")
        halves = [python.handled("both", 10, _TIMEOUT_MS), _handled(case.client, java, "both", 10)]

        python.kill()

        assert case.client.assigned(java, topic, 4, _TIMEOUT_MS) == [0, 1, 2, 3]
        alone = _send(case, topic, "alone")
        handled = _handled(case.client, java, "alone", 20)
    case.client.leave(java)
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert Counter(halves[0] + halves[1]) == Counter(both)
    assert Counter(handled) == Counter(alone)


def test_a_python_consumer_takes_the_queues_of_a_killed_java_consumer(case: Case) -> None:
    topic, group = case.topic("mixed-java-killed"), case.group("mixed-java-killed")
    case.tools.create_topic(topic)
    with PythonMember(case.server.address, group, topic) as python, JavaClient(case.server, case.version) as other:
        java = other.join(group, topic)
        shares = [python.queues(2, _TIMEOUT_MS), other.assigned(java, topic, 2, _TIMEOUT_MS)]
        both = _send(case, topic, "both")
        halves = [python.handled("both", 10, _TIMEOUT_MS), _handled(other, java, "both", 10)]

        other.kill()

        assert python.queues(4, _TIMEOUT_MS) == [0, 1, 2, 3]
        alone = _send(case, topic, "alone")
        handled = python.handled("alone", 20, _TIMEOUT_MS)
    assert sorted(shares) == [[0, 1], [2, 3]]
    assert Counter(halves[0] + halves[1]) == Counter(both)
    assert Counter(handled) == Counter(alone)
