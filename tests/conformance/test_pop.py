"""Unmodified push consumers of RocketMQ 5.5.0 pop: the broker assigns the queues, and each message is acknowledged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from bench.peer.java_client import PeerMessage
from mqtemplate import MessageRequestMode, MQApplication, message_listener
from tests.conformance.java_clients import Case
from tests.conformance.servers import Server
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(240)]

_TIMEOUT_MS = 60_000
_INVISIBLE_MS = 5_000
"""The shortest time that the client accepts."""


def _bodies(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix} {number}".encode() for number in range(count)]


class Group:
    """A topic, and a group whose members pop from it."""

    def __init__(self, case: Case, name: str, *, queues: int = 2) -> None:
        self.case = case
        self.topic, self.name = case.topic(f"pop-{name}"), case.group(f"pop-{name}")
        self.members: list[str] = []
        case.tools.create_topic(self.topic, queues)
        self.set_mode("POP")

    def set_mode(self, mode: str) -> None:
        printed = self.mqadmin("setConsumeMode", "-c", "DefaultCluster", "-m", mode)
        assert "success" in printed, printed

    def mqadmin(self, command: str, *arguments: str) -> str:
        return self.case.tools.mqadmin(command, "-t", self.topic, "-g", self.name, *arguments)

    def send(self, *texts: bytes, **more: object) -> None:
        self.case.client.send(*({"topic": self.topic, "body": text} | more for text in texts))

    def join(self, **options: object) -> str:
        member = self.case.client.join(self.name, self.topic, pop_invisible_ms=_INVISIBLE_MS, **options)
        self.members.append(member)
        return member

    def leave(self) -> None:
        for member in self.members:
            self.case.client.leave(member)
        self.members.clear()

    def handled(self, member: str, count: int, timeout_ms: int = _TIMEOUT_MS) -> list[PeerMessage]:
        return self.case.client.handled(member, count, timeout_ms)

    def committed(self) -> int:
        """Return the sum of the committed offsets."""
        return sum(self.case.tools.committed(self.name, self.topic).values())


@pytest.fixture
def groups(newest: Case) -> Iterator[list[Group]]:
    groups: list[Group] = []
    yield groups
    for group in groups:
        group.leave()


@pytest.fixture
def group(newest: Case, groups: list[Group], request: pytest.FixtureRequest) -> Group:
    """A group that only this test uses."""
    groups.append(Group(newest, re.sub(r"\W+", "-", request.node.originalname)[-40:]))
    return groups[-1]


def test_each_message_is_handled_once_and_acknowledged(group: Group) -> None:
    group.send(*_bodies("first", 10))
    member = group.join()
    before = group.handled(member, 10)

    group.send(*_bodies("second", 10))
    handled = group.handled(member, 20)

    eventually(lambda: group.committed() == 20, "all messages are acknowledged", timeout_s=30)
    assert Counter(message.body for message in before) == Counter(_bodies("first", 10))
    assert Counter(message.body for message in handled) == Counter(_bodies("first", 10) + _bodies("second", 10))
    assert {message.topic for message in handled} == {group.topic}


def test_more_members_than_queues_share_the_messages(newest: Case, groups: list[Group]) -> None:
    """With queues that belong to members, the second one would get nothing."""
    group = Group(newest, "one-queue", queues=1)
    groups.append(group)
    one, two = group.join(), group.join()

    for number in range(200):
        group.send(b"%d" % number)
        if group.handled(one, 1, 0) and group.handled(two, 1, 0):
            break
    sent = number + 1
    eventually(lambda: group.committed() == sent, "all messages are acknowledged", timeout_s=30)

    bodies = [message.body for member in (one, two) for message in group.handled(member, 0, 0)]
    assert group.handled(one, 0, 0)
    assert group.handled(two, 0, 0)
    assert Counter(bodies) == Counter(b"%d" % number for number in range(sent))


def test_a_failed_message_is_delivered_again_with_its_count(group: Group) -> None:
    """The consumer changes the invisible time: its first retry is after ten seconds."""
    group.send(b"fails", b"works")
    member = group.join(fail=[b"fails"])

    handled = {message.body: message for message in group.handled(member, 2)}

    retried = handled[b"fails"]
    assert (retried.reconsume_times, retried.topic) == (1, group.topic)
    assert handled[b"works"].reconsume_times == 0
    assert retried.properties["POP_CK"].split(" ")[4:6] == ["1", "broker-a"]


def test_a_member_selects_by_tags(group: Group) -> None:
    group.send(*_bodies("paid", 3), tags="paid")
    group.send(*_bodies("open", 3), tags="open")
    member = group.join(tags="paid || late")

    handled = group.handled(member, 3)

    eventually(lambda: group.committed() == 6, "what is not selected is done", timeout_s=30)
    assert Counter(message.body for message in handled) == Counter(_bodies("paid", 3))


def test_a_member_selects_by_sql92(group: Group, server: Server) -> None:
    group.send(b"small", properties={"amount": "3"})
    group.send(b"large", properties={"amount": "300"})
    member = group.join(sql="amount > 100")

    assert [message.body for message in group.handled(member, 1)] == [b"large"]


def test_a_group_pops_and_pulls_in_turns(group: Group) -> None:
    """Each continues after what the other has handled."""
    group.send(*_bodies("popped", 5))
    member = group.join()
    popped = group.handled(member, 5)
    eventually(lambda: group.committed() == 5, "all messages are acknowledged", timeout_s=30)
    group.leave()

    group.set_mode("PULL")
    group.send(*_bodies("pulled", 5))
    member = group.join()
    pulled = group.handled(member, 5)
    eventually(lambda: group.committed() == 10, "all offsets are committed", timeout_s=30)
    group.leave()

    group.set_mode("POP")
    group.send(*_bodies("again", 5))
    member = group.join()
    again = group.handled(member, 5)

    bodies = [[message.body for message in handled] for handled in (popped, pulled, again)]
    assert [Counter(each) for each in bodies] == [Counter(_bodies(name, 5)) for name in ("popped", "pulled", "again")]


# --- tools ------------------------------------------------------------------------------------------


def test_the_tools_show_the_members_and_the_progress_of_a_group(group: Group) -> None:
    """One message is always in flight or in the retry topic: its consumer fails."""
    group.send(*_bodies("a", 4))
    member = group.join(fail_always=[b"a 3"])
    group.handled(member, 3)

    eventually(lambda: _totals(group) == (1, 1), "three messages are acknowledged, one is in flight", timeout_s=60)
    connections = group.case.tools.mqadmin("consumerConnection", "-g", group.name)

    assert len(group.case.tools.members(group.name)) == 1
    assert group.topic in connections
    assert "CONSUME_PASSIVELY" in connections


def _totals(group: Group) -> tuple[int, int]:
    """Return the messages that are not acknowledged, and those in flight, as consumerProgress shows them."""
    printed = group.case.tools.mqadmin("consumerProgress", "-g", group.name)
    diff, in_flight = (
        re.search(rf"^Consume {name} Total: (\d+)$", printed, re.MULTILINE) for name in ("Diff", "Inflight")
    )
    assert diff is not None, printed
    assert in_flight is not None, printed
    return int(diff[1]), int(in_flight[1])


def test_after_a_reset_a_group_gets_the_messages_again(group: Group) -> None:
    group.send(*_bodies("a", 3))
    member = group.join()
    group.handled(member, 3)
    eventually(lambda: group.committed() == 3, "all messages are acknowledged", timeout_s=30)

    printed = group.mqadmin("resetOffsetByTime", "-s", "0")

    handled = group.handled(member, 6)
    assert Counter(message.body for message in handled) == Counter(_bodies("a", 3) * 2), printed


def test_a_deleted_topic_takes_its_retries_along(group: Group) -> None:
    group.send(b"fails")
    member = group.join(fail_always=[b"fails"])
    retry_topic = f"%RETRY%{group.name}_{group.topic}"
    eventually(lambda: retry_topic in group.case.tools.mqadmin("topicList"), "a retry is stored", timeout_s=60)
    group.leave()

    group.case.tools.mqadmin("deleteTopic", "-c", "DefaultCluster", "-t", group.topic)

    eventually(lambda: retry_topic not in group.case.tools.mqadmin("topicList"), "it is deleted", timeout_s=60)
    assert member


def test_a_python_and_a_java_member_share_the_messages(group: Group, server: Server) -> None:
    """Both send the same subscriptions, so that no heartbeat of one takes those of the other away."""
    mine: list[bytes] = []

    @message_listener(group.topic, group.name, request_mode=MessageRequestMode.POP)
    def handle(body: bytes) -> None:
        mine.append(body)

    settings = {"rocketmq.name-server": server.address, "rocketmq.producer.send-message-timeout": 30_000}
    sent: list[bytes] = []
    java = group.join()
    with MQApplication(handle, settings=settings, environment={}):
        for number in range(400):
            sent.append(b"%d" % number)
            group.send(sent[-1])
            if mine and group.handled(java, 1, 0):
                break
        eventually(lambda: len(mine) + len(group.handled(java, 0, 0)) >= len(sent), "all are handled", timeout_s=60)
        theirs = [message.body for message in group.handled(java, 0, 0)]
        group.leave()
        group.send(b"alone")
        eventually(lambda: b"alone" in mine, "the Python member handles the message", timeout_s=60)

    assert mine
    assert theirs
    assert Counter(mine + theirs) == Counter([*sent, b"alone"])
