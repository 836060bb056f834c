"""Headers of a message for its handler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtemplate.listener import message_headers

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage


def test_the_fields_of_a_message_have_the_prefix_of_rocketmq_spring(make_message: MakeMessage) -> None:
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


def test_user_properties_keep_their_names(make_message: MakeMessage) -> None:
    message = make_message(properties={"region": "eu", "REAL_TOPIC": "orders", "id": "1", "timestamp": "2"})

    headers = message_headers(message)

    assert headers["region"] == "eu"
    assert not {"REAL_TOPIC", "id", "timestamp"} & headers.keys()
