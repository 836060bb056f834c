"""The headers that a handler sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtemplate.listener import message_headers

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage


def test_the_facts_of_a_message_bear_the_prefix(make_message: MakeMessage) -> None:
    """Features 2.4: the names of rocketmq-spring."""
    message = make_message(
        properties={"KEYS": "4466", "TAGS": "2021S4", "UNIQ_KEY": "ABC", "DELAY": "3", "WAIT": "true"},
        flag=7,
        queue_id=2,
    )

    assert message_headers(message) == {
        "rocketmq_TOPIC": "orders",
        "rocketmq_TAGS": "2021S4",
        "rocketmq_KEYS": "4466",
        "rocketmq_MESSAGE_ID": "ABC",
        "rocketmq_DELAY": "3",
        "rocketmq_WAIT": "true",
        "rocketmq_FLAG": "7",
        "rocketmq_QUEUE_ID": "2",
        "rocketmq_SYS_FLAG": "0",
        "rocketmq_BORN_TIMESTAMP": "1700000000000",
        "rocketmq_BORN_HOST": "127.0.0.1",
    }


def test_the_senders_own_properties_come_as_they_are(make_message: MakeMessage) -> None:
    message = make_message(properties={"region": "eu", "REAL_TOPIC": "orders", "id": "1", "timestamp": "2"})

    headers = message_headers(message)

    assert headers["region"] == "eu"
    assert not {"REAL_TOPIC", "id", "timestamp"} & headers.keys()
