"""The template and the listeners of an unmodified rocketmq-spring application use the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from bench.peer.java_client import JavaClient, SpringApp
from tests.conformance.java_clients import Case, now_ms
from tests.conformance.servers import Server

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TIMEOUT_MS = 20_000
_TOPICS = ("texts", "objects", "ordered", "broadcast", "failing", "delayed", "paid", "requests", "pulled")


@pytest.fixture(scope="module")
def app(server: Server, tools: JavaClient) -> Iterator[SpringApp]:
    """The application. Its topics exist before it starts, because its listeners request new routes every 30 s only."""
    for name in _TOPICS:
        tools.create_topic(f"spring-{name}", 2)
    with SpringApp(server) as app:
        assert app.call("has_queues")
        yield app


def test_the_template_sends_and_a_listener_selects_by_tag(app: SpringApp) -> None:
    results = [
        app.call("syncSend", destination="spring-texts:paid", payload="sync", keys="k-1"),
        app.call("asyncSend", destination="spring-texts:refunded", payload="async"),
        app.call("syncSend", destination="spring-texts:open", payload="not selected"),
    ]
    app.call("sendOneWay", destination="spring-texts:paid", payload="one-way")

    received = app.received("tagged", 3, _TIMEOUT_MS)

    assert [result["status"] for result in results] == ["SEND_OK"] * 3
    assert {(message["body"], message["tags"]) for message in received} == {
        ("sync", "paid"),
        ("async", "refunded"),
        ("one-way", "paid"),
    }
    assert {message["keys"] for message in received if message["body"] == "sync"} == {"k-1"}


def test_a_listener_selects_by_sql92(app: SpringApp) -> None:
    for amount in (5, 10, 11, 50):
        app.call("syncSend", destination="spring-texts:sql", payload=f"{amount} EUR", headers={"amount": amount})

    received = app.received("sql", 2, _TIMEOUT_MS)

    assert {message["body"] for message in received} == {"11 EUR", "50 EUR"}


def test_an_object_is_sent_and_received(app: SpringApp) -> None:
    app.call("convertAndSend", destination="spring-objects", id="4466", amount=12)

    [received] = app.received("typed", 1, _TIMEOUT_MS)

    assert (received["id"], received["amount"]) == ("4466", 12)


def test_an_orderly_listener_receives_each_key_in_order(app: SpringApp) -> None:
    for number in range(8):
        for key in "ab":
            app.call("syncSendOrderly", destination="spring-ordered", payload=f"{key} {number}", hash_key=key)

    bodies = [message["body"] for message in app.received("orderly", 16, _TIMEOUT_MS)]

    assert [body for body in bodies if body[0] == "a"] == [f"a {number}" for number in range(8)]
    assert [body for body in bodies if body[0] == "b"] == [f"b {number}" for number in range(8)]


def test_a_batch_reaches_a_broadcasting_listener(app: SpringApp) -> None:
    result = app.call("batch", destination="spring-broadcast", payloads=["one", "two", "three"])

    received = app.received("broadcast", 3, _TIMEOUT_MS)

    assert len(result["msg_id"].split(",")) == 3
    assert sorted(message["body"] for message in received) == ["one", "three", "two"]


def test_a_message_whose_listener_fails_is_retried_and_becomes_a_dead_letter(app: SpringApp, tools: JavaClient) -> None:
    app.call("syncSend", destination="spring-failing:t", payload="bad")

    received = app.received("failing", 3, _TIMEOUT_MS)

    [dead] = tools.read("%DLQ%spring-failing-group", 1, _TIMEOUT_MS)
    assert [(message["body"], message["tags"], message["reconsume_times"]) for message in received] == [
        ("bad", "t", n) for n in range(3)
    ]
    assert dead.body == b"bad"


def test_delayed_messages_are_never_early(app: SpringApp, newest: Case) -> None:
    before = now_ms()
    app.call("syncSend", destination="spring-delayed", payload="level", level=1)
    app.call("syncSendDelayTimeSeconds", destination="spring-delayed", payload="seconds", time=1)
    app.call("syncSendDelayTimeMills", destination="spring-delayed", payload="milliseconds", time=1_200)
    app.call("syncSendDeliverTimeMills", destination="spring-delayed", payload="time", time=before + 1_400)

    received = {
        message["body"]: message["received_timestamp"] - before for message in app.received("delayed", 4, _TIMEOUT_MS)
    }

    assert set(received) == {"level", "seconds", "milliseconds", "time"}
    assert received["level"] >= 1_000
    assert received["seconds"] >= 1_000 - newest.early_ms
    assert received["milliseconds"] >= 1_200 - newest.early_ms
    assert received["time"] >= 1_400 - newest.early_ms


def test_transactions_are_committed_rolled_back_and_checked(app: SpringApp) -> None:
    transactions: dict[str, dict[str, object]] = {
        "committed": {"local": "COMMIT"},
        "rolled back": {"local": "ROLLBACK"},
        "committed by check": {"local": "UNKNOWN", "headers": {"checked": "COMMIT"}},
        "rolled back by check": {"local": "UNKNOWN", "headers": {"checked": "ROLLBACK"}},
    }
    states = [
        app.call("sendMessageInTransaction", destination="spring-paid", payload=body, **states)
        for body, states in transactions.items()
    ]

    checks = app.received("checks", 2, _TIMEOUT_MS)
    received = app.received("committed", 2, _TIMEOUT_MS)

    assert states == ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW", "UNKNOW"]
    assert {message["body"]: message["state"] for message in checks} == {
        "committed by check": "COMMIT",
        "rolled back by check": "ROLLBACK",
    }
    assert Counter(message["body"] for message in received) == {"committed": 1, "committed by check": 1}


def test_a_request_receives_the_reply_of_a_listener(app: SpringApp) -> None:
    reply = app.call("sendAndReceive", destination="spring-requests", payload="how many?")

    assert reply == "reply to how many?"


def test_the_template_receives(app: SpringApp) -> None:
    app.call("syncSend", destination="spring-pulled", payload="pulled")

    bodies = app.call("receive", timeout_ms=_TIMEOUT_MS)

    assert bodies == ["pulled"]
