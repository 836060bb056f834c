"""The template and the listeners of an unmodified application of RocketMQ's Spring starter for version 5."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.peer.java_client import SpringV5App, fetch_spring_v5
from bench.peer.jvm import unavailable_reason
from tests.conformance.grpc_clients.servers import OWN, Administrator, GrpcServer
from tests.conformance.java_clients import now_ms

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(600)]

_TIMEOUT_MS = 60_000
_RETRIES = 2
_TOPICS = {
    "texts": "",
    "ordered": "FIFO",
    "failing": "",
    "delayed": "DELAY",
    "transactions": "TRANSACTION",
    "received": "",
}
"""End of the name -> message type."""


@pytest.fixture(scope="module")
def app(open_server: GrpcServer) -> Iterator[SpringV5App]:
    if reason := unavailable_reason() or fetch_spring_v5():
        pytest.skip(reason)
    with Administrator(open_server) as administrator:
        for name, message_type in _TOPICS.items():
            administrator.create_topic(f"v5-{name}", message_type)
        for name in (*_TOPICS, "sql"):
            retries = _RETRIES if name == "failing" else 16
            administrator.create_group(f"v5-{name}-group", retries=retries, ordered=name == "ordered")
    with SpringV5App(open_server.endpoint) as app:
        yield app


def test_the_template_sends_and_listeners_select(app: SpringV5App) -> None:
    """By tags, and by SQL92. A header is a property."""
    headers = {"KEYS": "k-1", "amount": "50"}
    sync_id = app.call("syncSendNormalMessage", destination="v5-texts:paid", payload="sync", headers=headers)
    async_id = app.call("asyncSendNormalMessage", destination="v5-texts:refunded", payload="async")
    app.call("syncSendNormalMessage", destination="v5-texts:open", payload="large", headers={"amount": "500"})
    object_id = app.call("object", destination="v5-texts:paid", id="4466", amount=12)

    tagged = {message["id"]: message for message in app.received("tagged", 3, _TIMEOUT_MS)}
    by_amount = app.received("sql", 2, _TIMEOUT_MS)

    assert {message_id: (found["body"], found["tag"]) for message_id, found in tagged.items()} == {
        sync_id: ("sync", "paid"),
        async_id: ("async", "refunded"),
        object_id: ('{"id":"4466","amount":12}', "paid"),
    }
    assert tagged[sync_id]["keys"] == ["k-1"]
    assert tagged[sync_id]["properties"]["amount"] == "50"
    assert sorted(message["body"] for message in by_amount) == ["large", "sync"]


def test_a_listener_receives_each_message_group_in_order(app: SpringV5App) -> None:
    for number in range(4):
        for group in "ab":
            app.call("syncSendFifoMessage", destination="v5-ordered", payload=f"{group} {number}", group=group)

    bodies = [message["body"] for message in app.received("ordered", 8, _TIMEOUT_MS)]

    for group in "ab":
        assert [body for body in bodies if body[0] == group] == [f"{group} {number}" for number in range(4)]


def test_a_failing_listener_receives_all_attempts(app: SpringV5App) -> None:
    app.call("syncSendNormalMessage", destination="v5-failing", payload="bad")

    received = app.received("failing", 1 + _RETRIES, _TIMEOUT_MS)

    assert [message["attempt"] for message in received] == [1, 2, 3]


def test_a_delayed_message_is_not_early(app: SpringV5App, server_name: str) -> None:
    """The starter computes the time from the delay. RocketMQ's timers have slots of one second."""
    before_ms = now_ms()
    app.call("syncSendDelayMessage", destination="v5-delayed", payload="delayed", delay_ms=3_000)

    [received] = app.received("delayed", 1, _TIMEOUT_MS)

    assert received["received_ms"] >= before_ms + 3_000 - (0 if server_name == OWN else 1_000)


def test_transactions_are_committed_rolled_back_and_checked(app: SpringV5App) -> None:
    for body, end in (("committed", "commit"), ("rolled back", "rollback"), ("checked", None)):
        app.call("sendMessageInTransaction", destination="v5-transactions", payload=body, end=end)

    received = app.received("committed", 2, _TIMEOUT_MS)
    checks = app.received("checks", 1, _TIMEOUT_MS)

    assert sorted(message["body"] for message in received) == ["checked", "committed"]
    assert {message["body"] for message in checks} == {"checked"}


def test_the_template_receives_and_acknowledges(app: SpringV5App) -> None:
    for body in ("one", "two"):
        app.call("syncSendNormalMessage", destination="v5-received", payload=body)

    assert sorted(app.call("receive", count=2)) == ["one", "two"]
