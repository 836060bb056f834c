"""Topic and group names on the wire, as in RocketMQ's ``NamespaceUtil``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import from_regex, sampled_from

from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.message import MessageQueue
from mqtemplate.topics import SYSTEM_TOPICS

PROD = Namespace("prod")


@pytest.mark.parametrize(
    ("name", "on_the_wire"),
    [
        ("orders", "prod%orders"),
        ("%RETRY%billing", "%RETRY%prod%billing"),
        ("%DLQ%billing", "%DLQ%prod%billing"),
        ("prod%orders", "prod%orders"),
        ("TBW102", "TBW102"),
        ("TOOLS_CONSUMER", "TOOLS_CONSUMER"),
        ("rmq_sys_wheel_timer", "rmq_sys_wheel_timer"),
    ],
)
def test_the_prefix_stands_after_retry_and_dlq(name: str, on_the_wire: str) -> None:
    assert PROD.wrap(name) == on_the_wire


@pytest.mark.parametrize("name", sorted(SYSTEM_TOPICS))
def test_system_topics_have_no_namespace(name: str) -> None:
    assert PROD.wrap(name) == name


@given(sampled_from(["", "%RETRY%", "%DLQ%"]), from_regex(r"[a-z][a-zA-Z0-9-]{0,20}", fullmatch=True))
def test_unwrap_reverses_wrap(kind: str, name: str) -> None:
    assert PROD.unwrap(PROD.wrap(kind + name)) == kind + name


def test_a_name_of_another_namespace_is_not_changed() -> None:
    assert PROD.unwrap("test%orders") == "test%orders"


def test_without_a_namespace_no_name_is_changed() -> None:
    queue = MessageQueue("orders", "broker-a", 1)

    assert Namespace("").wrap("orders") == Namespace("").unwrap("orders") == "orders"
    assert Namespace("").wrap_queue(queue) is Namespace("").unwrap_queue(queue) is queue


def test_the_topic_of_a_queue_is_wrapped() -> None:
    queue = MessageQueue("orders", "broker-a", 1)

    assert PROD.wrap_queue(queue) == MessageQueue("prod%orders", "broker-a", 1)
    assert PROD.unwrap_queue(PROD.wrap_queue(queue)) == queue
