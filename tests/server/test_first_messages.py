"""First messages create their topics: those that wait together need one write of the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.errors import DestinationError, StoreFullError
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.first_messages import FirstMessage, FirstMessages
from mqtemplate.server.limits.quota import Owner
from mqtemplate.server.response import RefusedError
from mqtemplate.topics import AUTO_CREATE_TOPIC
from tests.server.serving import Serving

OWNER = Owner(1, "10.0.0.9")


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(BrokerServerSettings(auto_create_burst=3)) as serving:
        yield serving


@pytest.fixture
def first_messages(serving: Serving) -> FirstMessages:
    return FirstMessages(serving.server.topics, serving.server.limits.topics)


def message(topic: str, default_topic: str = AUTO_CREATE_TOPIC) -> FirstMessage:
    return FirstMessage(topic, default_topic, 4, OWNER)


def test_the_topics_of_all_messages_that_wait_are_created_by_one_write(
    serving: Serving, first_messages: FirstMessages
) -> None:
    topics, waiting = serving.server.topics, [message("orders"), message("payments")]
    for each in waiting:
        first_messages.add(each)
    before = topics.version.counter

    first_messages.create(message("parcels"))

    assert [topics.has(name) for name in ("orders", "payments", "parcels")] == [True, True, True]
    assert topics.version.counter == before + 1
    for each in waiting:
        first_messages.create(each)
    assert topics.version.counter == before + 1


def test_each_message_gets_its_own_error_and_the_others_their_topics(
    serving: Serving, first_messages: FirstMessages
) -> None:
    illegal, unlike, late = message("no/topic"), message("orders", "missing"), message("fourth")
    for each in (illegal, unlike, message("first"), message("second"), message("third"), late):
        first_messages.add(each)

    first_messages.create(message("first"))

    assert [serving.server.topics.has(name) for name in ("first", "second", "third", "fourth")] == [True] * 3 + [False]
    with pytest.raises(DestinationError, match="no/topic"):
        first_messages.create(illegal)
    with pytest.raises(RefusedError, match="a message may not create it like 'missing'"):
        first_messages.create(unlike)
    with pytest.raises(RefusedError, match="may create 3 topics at once"):
        first_messages.create(late)


def test_two_messages_to_one_topic_count_as_one(serving: Serving, first_messages: FirstMessages) -> None:
    for name in ("orders", "orders", "payments"):
        first_messages.add(message(name))

    first_messages.create(message("parcels"))

    assert serving.server.topics.has("parcels")


def test_if_the_table_cannot_be_written_each_message_gets_an_error_of_its_own(
    serving: Serving, first_messages: FirstMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(changes: object) -> None:
        raise StoreFullError("the disk is full")

    waiting = message("orders")
    first_messages.add(waiting)
    monkeypatch.setattr(serving.server.topics, "create_all", fail)

    with pytest.raises(StoreFullError, match="the disk is full") as one:
        first_messages.create(message("payments"))
    with pytest.raises(StoreFullError, match="the disk is full") as other:
        first_messages.create(waiting)

    assert one.value is not other.value
    assert not serving.server.topics.has("orders")


def test_a_message_whose_topic_was_created_meanwhile_is_forgotten(
    serving: Serving, first_messages: FirstMessages
) -> None:
    done = message("orders")
    first_messages.create(done)

    first_messages.add(done)

    assert not first_messages._waiting
