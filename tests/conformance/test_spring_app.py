"""An application of rocketmq-spring, unmodified: its template and its listeners at our server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from bench.peer.java_client import JavaClient, SpringApp
from tests.conformance.java_clients import now_ms
from tests.conformance.servers import Server

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_PATIENCE_MS = 20_000
_TOPICS = ("texts", "objects", "ordered", "broadcast", "failing", "later", "paid", "questions", "pulled")


@pytest.fixture(scope="module")
def app(server: Server, tools: JavaClient) -> Iterator[SpringApp]:
    """Its topics are made before it starts, since its listeners look for new routes every 30 s only."""
    for name in _TOPICS:
        tools.create_topic(f"spring-{name}", 2)
    with SpringApp(server) as app:
        assert app.ask("has_queues")
        yield app


def test_the_template_sends_and_a_listener_selects_by_tag(app: SpringApp) -> None:
    results = [
        app.ask("syncSend", destination="spring-texts:paid", payload="sync", keys="k-1"),
        app.ask("asyncSend", destination="spring-texts:refunded", payload="async"),
        app.ask("syncSend", destination="spring-texts:open", payload="not selected"),
    ]
    app.ask("sendOneWay", destination="spring-texts:paid", payload="one-way")

    seen = app.seen("tagged", 3, _PATIENCE_MS)

    assert [result["status"] for result in results] == ["SEND_OK"] * 3
    assert {(one["body"], one["tags"]) for one in seen} == {
        ("sync", "paid"),
        ("async", "refunded"),
        ("one-way", "paid"),
    }
    assert {one["keys"] for one in seen if one["body"] == "sync"} == {"k-1"}


def test_a_listener_selects_by_sql92(app: SpringApp) -> None:
    for amount in (5, 10, 11, 50):
        app.ask("syncSend", destination="spring-texts:sql", payload=f"{amount} EUR", headers={"amount": amount})

    seen = app.seen("sql", 2, _PATIENCE_MS)

    assert {one["body"] for one in seen} == {"11 EUR", "50 EUR"}


def test_an_object_is_sent_and_received(app: SpringApp) -> None:
    app.ask("convertAndSend", destination="spring-objects", id="4466", amount=12)

    [seen] = app.seen("typed", 1, _PATIENCE_MS)

    assert (seen["id"], seen["amount"]) == ("4466", 12)


def test_an_orderly_listener_sees_each_key_in_order(app: SpringApp) -> None:
    for number in range(8):
        for key in "ab":
            app.ask("syncSendOrderly", destination="spring-ordered", payload=f"{key} {number}", hash_key=key)

    bodies = [one["body"] for one in app.seen("orderly", 16, _PATIENCE_MS)]

    assert [body for body in bodies if body[0] == "a"] == [f"a {number}" for number in range(8)]
    assert [body for body in bodies if body[0] == "b"] == [f"b {number}" for number in range(8)]


def test_a_batch_reaches_a_broadcasting_listener(app: SpringApp) -> None:
    result = app.ask("batch", destination="spring-broadcast", payloads=["one", "two", "three"])

    seen = app.seen("broadcast", 3, _PATIENCE_MS)

    assert len(result["msg_id"].split(",")) == 3
    assert sorted(one["body"] for one in seen) == ["one", "three", "two"]


def test_a_listener_that_fails_sees_the_message_again_until_it_is_a_dead_letter(
    app: SpringApp, tools: JavaClient
) -> None:
    app.ask("syncSend", destination="spring-failing:t", payload="bad")

    seen = app.seen("failing", 3, _PATIENCE_MS)

    [dead] = tools.read("%DLQ%spring-failing-group", 1, _PATIENCE_MS)
    assert [(one["body"], one["tags"], one["reconsume_times"]) for one in seen] == [("bad", "t", n) for n in range(3)]
    assert dead.body == b"bad"


def test_levels_and_timers_are_kept_and_never_early(app: SpringApp, early_ms: int) -> None:
    before = now_ms()
    app.ask("syncSend", destination="spring-later", payload="level", level=1)
    app.ask("syncSendDelayTimeSeconds", destination="spring-later", payload="seconds", time=1)
    app.ask("syncSendDelayTimeMills", destination="spring-later", payload="milliseconds", time=1_200)
    app.ask("syncSendDeliverTimeMills", destination="spring-later", payload="time", time=before + 1_400)

    seen = {one["body"]: one["seen_timestamp"] - before for one in app.seen("later", 4, _PATIENCE_MS)}

    assert set(seen) == {"level", "seconds", "milliseconds", "time"}
    assert seen["level"] >= 1_000
    assert seen["seconds"] >= 1_000 - early_ms
    assert seen["milliseconds"] >= 1_200 - early_ms
    assert seen["time"] >= 1_400 - early_ms


def test_transactions_are_committed_rolled_back_and_asked_about(app: SpringApp) -> None:
    send = {"destination": "spring-paid"}
    states = [
        app.ask("sendMessageInTransaction", **send, payload="committed", local="COMMIT"),
        app.ask("sendMessageInTransaction", **send, payload="rolled back", local="ROLLBACK"),
        app.ask("sendMessageInTransaction", **send, payload="late", local="UNKNOWN", headers={"checked": "COMMIT"}),
        app.ask("sendMessageInTransaction", **send, payload="no", local="UNKNOWN", headers={"checked": "ROLLBACK"}),
    ]

    checks = app.seen("checks", 2, _PATIENCE_MS)
    seen = app.seen("committed", 2, _PATIENCE_MS)

    assert states == ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW", "UNKNOW"]
    assert {one["body"]: one["told"] for one in checks} == {"late": "COMMIT", "no": "ROLLBACK"}
    assert Counter(one["body"] for one in seen) == {"committed": 1, "late": 1}


def test_a_request_is_answered_by_a_reply_listener(app: SpringApp) -> None:
    answer = app.ask("sendAndReceive", destination="spring-questions", payload="how many?")

    assert answer == "answer to how many?"


def test_the_template_receives(app: SpringApp) -> None:
    app.ask("syncSend", destination="spring-pulled", payload="pulled")

    received = app.ask("receive", timeout_ms=_PATIENCE_MS)

    assert received == ["pulled"]
