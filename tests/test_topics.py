"""System topics, as RocketMQ names them, and the topic with the most similar name, as a hint after a typing error."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from mqtemplate.broker import TopicKind
from mqtemplate.topics import (
    HAND_OVER_MOVED_TOPIC,
    HAND_OVER_TOPIC,
    MARKS_TOPIC,
    NOT_SENDABLE_TOPICS,
    POP_PROGRESS_TOPIC,
    SCHEDULES_TOPIC,
    SYSTEM_TOPICS,
    TIMER_TOPIC,
    is_application_topic,
    is_system_group,
    nearest_topic,
    reply_topic,
)
from tests.remoting.protocol.golden_file import golden

JARS = sorted((Path(__file__).parents[1] / ".rocketmq").glob("rocketmq-*/rocketmq-common-*.jar"))
PREFIXES = {"", "%DLQ%", "%RETRY%", "rmq_sys_", "rmq_sys_SYNC_BROKER_MEMBER_"}
OWN = {POP_PROGRESS_TOPIC, HAND_OVER_TOPIC, HAND_OVER_MOVED_TOPIC}

MANY = [f"{name}-{number}" for name in ("invoice", "parcel") for number in range(1_000)]


@pytest.mark.parametrize("typed", ["ordres", "oders", "order", "Orders", "orders-"])
@pytest.mark.parametrize("others", [[], MANY], ids=["few topics", "thousands of topics"])
def test_a_typing_error_is_recognised(typed: str, others: list[str]) -> None:
    assert nearest_topic(typed, ["payments", *others, "orders"]) == "orders"


def test_there_is_no_hint_if_hundreds_of_topics_are_equally_similar() -> None:
    """It would be chance, and comparing each new topic with all others would take longer with each of them."""
    assert nearest_topic("invoice-1000", MANY) is None


def test_topics_of_the_broker_are_no_hint() -> None:
    assert nearest_topic("RETRY_orders", ["%RETRY%orders", "TBW102"]) is None


def test_the_hint_is_never_the_topic_itself() -> None:
    """A topic that was missing a moment ago may have been created since."""
    assert nearest_topic("orders", ["orders", "order"]) == "order"
    assert nearest_topic("orders", ["orders"]) is None


# --- system topics ------------------------------------------------------------------------------


def test_the_system_topics_and_groups_are_those_of_rocketmq() -> None:
    """The timer topic is not in RocketMQ's sets: its name has the prefix."""
    names = golden("topic")

    assert SYSTEM_TOPICS - OWN - {TIMER_TOPIC} == names.keys()
    assert NOT_SENDABLE_TOPICS - OWN - {TIMER_TOPIC} == {name for name in names if names[name] == "not sendable"}
    assert [name for name in golden("group") if not is_system_group(name)] == []


def text_constants(class_file: bytes) -> Iterator[str]:
    """Yield the texts in the code of a Java class. Source: the Java Virtual Machine Specification, 4.4."""
    sizes = {7: 3, 8: 3, 15: 4, 16: 3, 19: 3, 20: 3} | dict.fromkeys((3, 4, 9, 10, 11, 12, 17, 18), 5)
    (count,) = struct.unpack_from(">H", class_file, 8)
    texts: dict[int, str] = {}
    used: list[int] = []
    number, at = 1, 10
    while number < count:
        kind = class_file[at]
        if kind == 1:
            (length,) = struct.unpack_from(">H", class_file, at + 1)
            texts[number] = class_file[at + 3 : at + 3 + length].decode()
            at += 3 + length
        elif kind in (5, 6):  # a long or a double takes two numbers
            number, at = number + 1, at + 9
        else:
            if kind == 8:
                used.append(*struct.unpack_from(">H", class_file, at + 1))
            at += sizes[kind]
        number += 1
    return (texts[each] for each in used)


@pytest.mark.skipif(not JARS, reason="no packages of RocketMQ in .rocketmq: make setup")
@pytest.mark.parametrize("jar", JARS, ids=lambda jar: jar.stem)
def test_each_version_of_rocketmq_here_has_no_other_system_topics(jar: Path) -> None:
    with ZipFile(jar) as files:
        texts = set(text_constants(files.read("org/apache/rocketmq/common/topic/TopicValidator.class")))

    names = {text for text in texts if re.fullmatch(r"[%|\w-]*", text)} - PREFIXES
    assert len(names) >= 9
    assert names - SYSTEM_TOPICS == set()


@pytest.mark.parametrize(
    "name",
    [
        *sorted(SYSTEM_TOPICS),
        "rmq_sys_REVIVE_LOG_DefaultCluster",
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a",
        "rmq_sys_TRACE_DATA_eu",
        "RMQ_SYS_OF_A_LATER_VERSION",
        "%LMQ%$orders$lite",
        "%RETRY%billing",
        "%DLQ%billing",
        "%DLQ%SCHEDULE",
        MARKS_TOPIC,
        reply_topic("DefaultCluster"),
    ],
)
def test_it_is_no_topic_of_an_application(name: str) -> None:
    assert not is_application_topic(name)
    assert TopicKind.of(name) is not TopicKind.NORMAL


@pytest.mark.parametrize("name", ["orders", "rmq_orders", "SYS_orders", "shop%orders", SCHEDULES_TOPIC])
def test_it_is_a_topic_of_an_application(name: str) -> None:
    assert is_application_topic(name)
    assert TopicKind.of(name) is TopicKind.NORMAL
