"""Work on many messages: its rate, an interruption, and namespaces of a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mqtemplate.brokers import RemoteBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError
from mqtemplate.message import Message
from mqtemplate.operations import BrokerAccess, DeadLetterMessage, DeadLetters, LetterState, MessageSearch
from mqtemplate.operations.bulk import paced
from mqtemplate.operations.dead_letters import LetterFilter
from tests.operations.brokers import access_of, server


def test_a_rate_spaces_the_items_evenly() -> None:
    clock = VirtualClock()
    start_ms = clock.now_ms()

    times = [clock.now_ms() - start_ms for _ in paced(range(5), 4, clock)]

    assert times == [0, 250, 500, 750, 1_000]
    assert [clock.now_ms() - start_ms - 1_000 for _ in paced(range(2), None, clock)] == [0, 0]


def test_a_rate_must_be_above_0() -> None:
    with pytest.raises(MessageError, match="the rate must be above 0 per second, got 0; leave it out for no limit"):
        list(paced([1], 0, VirtualClock()))


def test_an_interrupted_resend_marks_what_was_sent(tmp_path: Path) -> None:
    """The second call continues: no message is sent twice."""
    with access_of("memory", tmp_path) as access:
        letters = DeadLetters(access)
        sent: list[int] = []

        def interrupt(count: int) -> None:
            sent.append(count)
            if len(sent) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            letters.resend(letters.find("billing"), on_progress=interrupt)
        left = list(letters.find("billing"))
        letters.resend(left)

        assert len(left) == 1
        assert list(letters.find("billing")) == []
        assert access.admin.topic("orders").message_count == 13


def test_a_dead_letter_without_its_topic_cannot_be_resent(tmp_path: Path) -> None:
    """For example one that a program has sent to the dead-letter topic itself."""
    with access_of("memory", tmp_path) as access:
        access.open_for_changes().sends.send(Message("%DLQ%billing", b"foreign"))
        letters = DeadLetters(access)
        foreign = [each for each in letters.find("billing") if each.message.body == b"foreign"]
        with pytest.raises(MessageError, match="does not name the topic that it was sent to"):
            letters.resend(foreign)

        assert isinstance(foreign[0], DeadLetterMessage)
        assert list(letters.find("billing", LetterFilter(state=LetterState.RESENT))) == []


def test_a_client_with_a_namespace_sees_its_names_without_it(tmp_path: Path) -> None:
    with server(tmp_path) as settings, RemoteBroker(replace(settings, namespace="shop")) as client:
        access = BrokerAccess(client)
        client.create_topic("orders", 1)
        client.sends.send(Message("orders", b"hello", {"KEYS": "k"}))
        names = access.admin.topic_names()
        message = MessageSearch(access).by_key("orders", "k")[0]
        topic = access.admin.topic("orders")

    assert "orders" in names
    assert "shop%orders" not in names
    assert (message.topic, message.body) == ("orders", b"hello")
    assert [span.queue.topic for span in topic.queues] == ["orders"]
