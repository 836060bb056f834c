"""Business keys: what `keys=` takes is found, cancelled and rescheduled by the same value, everywhere."""

from __future__ import annotations

import enum
import re
import uuid
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError
from mqtemplate.message import joined_keys, key_text, split_keys
from mqtemplate.operations.dead_letters import LetterFilter
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.store.key_reader import keys_of
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate


class _Number(enum.Enum):
    FIRST = 12


class _Name(enum.StrEnum):
    SHOP = "shop"


class _Id:
    def __str__(self) -> str:
        return "01ARZ3NDEK"


_UUID = uuid.UUID(int=7)
_KEYS: list[tuple[Any, str]] = [
    (12, "12"),
    (0, "0"),
    (-1, "-1"),
    (1.5, "1.5"),
    (Decimal("1.50"), "1.50"),
    (_UUID, str(_UUID)),
    (_Number.FIRST, "12"),
    (_Name.SHOP, "shop"),
    (date(2026, 1, 2), "2026-01-02"),
    (_Id(), "01ARZ3NDEK"),
    ("a\tb", "a\tb"),
    ("a\nb", "a\nb"),
    ("a\u00a0b", "a\u00a0b"),
    ("straße", "straße"),
    ("*", "*"),
]


@pytest.mark.parametrize(("key", "text"), _KEYS, ids=[repr(text) for _, text in _KEYS])
@pytest.mark.parametrize("delay", [{"delay_level": 5}, {"delay": "1m"}], ids=["level", "timer"])
def test_a_key_names_its_message_in_every_call(
    mqtemplate_template: RecordingTemplate, key: Any, text: str, delay: dict[str, Any]
) -> None:
    """``cancel(key=12)`` raised a TypeError for the message that ``keys=12`` had sent; a tab made two keys of one."""
    template, broker = mqtemplate_template, mqtemplate_template.broker
    template.sync_send("orders", b"now", keys=key)
    template.sync_send("orders", b"later", keys=[key, "other"], **delay)

    [pending] = template.pending(key=key).messages
    assert pending.keys == f"{text} other"
    assert template.count_pending(key=key).total == 1
    assert template.pending(key=text).messages == (pending,)
    assert [message.keys for message in broker.messages_by_key("orders", key)] == [text]
    assert template.reschedule(key=key, delay="2m").status is ScheduleChangeStatus.RESCHEDULED
    assert template.cancel(key=key).status is ScheduleChangeStatus.CANCELLED
    assert template.cancel(key=text).status is ScheduleChangeStatus.CANCELLED  # the message of the line above


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (True, "a key must be text, a number or a UUID, got bool True"),
        (None, "a key must be text, a number or a UUID, got NoneType None"),
        (b"12", "a key must be text, a number or a UUID, got bytes b'12'"),
        ([12], "a key must be text, a number or a UUID, got list [12]"),
        ({"a": 1}, "a key must be text, a number or a UUID, got dict {'a': 1}"),
        (object, "a key must be text, a number or a UUID, got type <class 'object'>"),
        ("", "a key must be one word, got ''; call once for each key"),
        ("a b", "a key must be one word, got 'a b'; call once for each key"),
        ("a\x01b", "a key contains \\x01 or \\x02"),
        ("\ud800", "or a surrogate, which UTF-8 does not have: '\\ud800'"),
    ],
    ids=repr,
)
def test_a_value_that_is_no_key_is_refused_by_every_call(
    mqtemplate_template: RecordingTemplate, key: Any, text: str
) -> None:
    template = mqtemplate_template
    calls = [
        lambda: template.broker.messages_by_key("orders", key),
        *([] if key is None else [lambda: template.cancel(key=key), lambda: template.pending(key=key)]),
        *([] if key is None else [lambda: template.reschedule(key=key), lambda: template.broker.cancel(key=key)]),
        *([] if key is None else [lambda: PendingQuery(key=key), lambda: LetterFilter(key=key)]),
    ]
    for call in calls:
        with pytest.raises(MessageError) as refused:
            call()
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [True, b"12", {"a": 1}, [True], [None], [b"x"], [["a"]], object()],
    ids=lambda keys: re.sub(" at 0x[0-9a-f]+", "", repr(keys)),
)
def test_a_value_that_is_no_key_is_not_sent_either(mqtemplate_template: RecordingTemplate, keys: Any) -> None:
    with pytest.raises(MessageError, match="a key must be text, a number or a UUID, got"):
        mqtemplate_template.sync_send("orders", b"x", keys=keys)
    with pytest.raises(MessageError, match="a key must be text, a number or a UUID, got"):
        mqtemplate_template.sync_send("orders", b"x", headers={"KEYS": keys})


def test_only_the_blank_separates_keys_in_every_place() -> None:
    """RocketMQ's index splits at blanks. Another separator in another place would not find what the index has."""
    keys = "  a\tb  c\u00a0d e\n "

    assert split_keys(keys) == ["a\tb", "c\u00a0d", "e\n"]
    assert joined_keys(keys) == "a\tb c\u00a0d e\n"
    assert joined_keys(["a\tb", 12]) == "a\tb 12"
    assert keys_of("t", f"KEYS\x01{keys}\x02".encode()) == ["t#a\tb", "t#c\u00a0d", "t#e\n"]
    assert split_keys(None) == split_keys("") == split_keys("  ") == []
    assert joined_keys("  ") == joined_keys(()) == ""


def test_a_key_of_a_java_producer_is_found_as_the_broker_indexed_it() -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        template = RocketMQTemplate(broker)
        template.sync_send("orders", b"x", keys="A-1\tB-2", delay="1m")

        assert template.cancel(key="A-1").status is ScheduleChangeStatus.UNKNOWN
        assert template.cancel(key="A-1\tB-2").status is ScheduleChangeStatus.CANCELLED


def test_the_text_of_a_key_is_the_one_that_is_stored() -> None:
    assert [key_text(key) for key, _ in _KEYS] == [text for _, text in _KEYS]
    assert [joined_keys([key]) for key, _ in _KEYS] == [text for _, text in _KEYS]
