"""Unmodified Java clients of RocketMQ send in all forms: every message is stored as it was sent."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.java_clients import Case, now_ms

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TIMEOUT_MS = 15_000


def test_a_message_is_stored_as_it_was_sent(case: Case) -> None:
    """It has the queue, the queue offset and the message ID of the send result."""
    topic = case.topic("sync")
    message = {"topic": topic, "body": "grüße".encode(), "tags": "paid", "keys": "k1 k2", "flag": 7}

    sent = case.client.send(message | {"properties": {"user": "ünder"}})[0]

    [found] = case.client.read(topic, 1, _TIMEOUT_MS)
    assert sent["status"] == "SEND_OK"
    assert (found.body, found.tags, found.keys, found.flag) == (message["body"], "paid", "k1 k2", 7)
    assert found.properties["user"] == "ünder"
    assert (found.queue_id, found.queue_offset, found.msg_id) == (
        sent["queue_id"],
        sent["queue_offset"],
        sent["msg_id"],
    )


@pytest.mark.parametrize("mode", ["sync", "async", "oneway"])
def test_every_send_mode_stores_each_message_once(case: Case, mode: str) -> None:
    topic = case.topic(f"mode-{mode}")
    bodies = [b"%s %d" % (mode.encode(), number) for number in range(40)]
    case.client.send({"topic": topic, "body": bodies[0]})  # The first message creates the topic.

    results = case.client.send(*({"topic": topic, "body": body} for body in bodies[1:]), mode=mode)

    found = case.client.read(topic, len(bodies), _TIMEOUT_MS)
    assert Counter(message.body for message in found) == Counter(bodies)
    assert [result and result["status"] for result in results] == [None if mode == "oneway" else "SEND_OK"] * 39


def test_a_batch_has_consecutive_offsets_in_one_queue(case: Case) -> None:
    topic = case.topic("batch")
    batch = [{"topic": topic, "body": b"%d" % number, "tags": "t", "keys": f"key-{number}"} for number in range(10)]

    sent = case.client.send_batch(*batch)

    found = case.client.read(topic, 10, _TIMEOUT_MS)
    assert [(message.body, message.keys) for message in found] == [
        (message["body"], message["keys"]) for message in batch
    ]
    assert [message.queue_offset - sent["queue_offset"] for message in found] == list(range(10))
    assert {message.queue_id for message in found} == {sent["queue_id"]}
    assert [message.msg_id for message in found] == sent["msg_id"].split(",")
    assert len(sent["offset_msg_id"].split(",")) == 10


def test_a_compressed_body_is_read_completely(case: Case) -> None:
    """The client compresses bodies of 4 KiB and more. The server stores them unchanged."""
    topic = case.topic("compressed")
    body = b"again and again " * 4_000

    case.client.send({"topic": topic, "body": body})

    [found] = case.client.read(topic, 1, _TIMEOUT_MS)
    assert found.body == body
    assert 0 < (found.store_size or 0) < len(body) / 10


def test_a_queue_selector_selects_the_queue(case: Case) -> None:
    topic = case.topic("selected")
    case.client.send({"topic": topic, "body": b"first"})

    sent = case.client.send(*({"topic": topic, "body": b"%d" % number, "queue_id": number % 4} for number in range(8)))

    assert [result["queue_id"] for result in sent] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("level", [1, 2])
def test_a_message_with_a_delay_level_is_never_early(case: Case, level: int) -> None:
    topic = case.topic(f"level-{level}")
    before = now_ms()

    case.client.send({"topic": topic, "body": b"delayed", "level": level, "tags": "late", "keys": "k"})

    [found] = case.client.read(topic, 1, _TIMEOUT_MS)
    assert found.store_timestamp >= before + level * 1_000
    assert (found.body, found.tags, found.keys) == (b"delayed", "late", "k")


def test_timers_are_never_early(newest: Case) -> None:
    """Set the delay in seconds, the delay in milliseconds, or the time. The client 4.9.8 has no timers."""
    topic = newest.topic("timers")
    before = now_ms()
    delays = {b"seconds": ("delay_sec", 1), b"ms": ("delay_ms", 1_300), b"time": ("deliver_ms", before + 1_700)}

    newest.client.send(*({"topic": topic, "body": body, name: time} for body, (name, time) in delays.items()))

    found = {message.body: message.store_timestamp - before for message in newest.client.read(topic, 3, _TIMEOUT_MS)}
    assert set(found) == set(delays)
    assert found[b"seconds"] >= 1_000 - newest.early_ms
    assert found[b"ms"] >= 1_300 - newest.early_ms
    assert found[b"time"] >= 1_700 - newest.early_ms


def test_a_recalled_message_is_never_delivered(newest: Case) -> None:
    topic = newest.topic("recalled")
    sent = newest.client.send({"topic": topic, "body": b"recalled", "delay_ms": 3_000})[0]

    recalled = newest.client.recall(topic, sent["recall_handle"])

    newest.client.send({"topic": topic, "body": b"after it", "delay_ms": 3_500})
    found = newest.client.read(topic, until=b"after it", timeout_ms=_TIMEOUT_MS)
    assert recalled == sent["msg_id"]
    assert [message.body for message in found] == [b"after it"]


def test_a_message_is_found_by_message_id_offset_message_id_and_keys(case: Case) -> None:
    topic = case.topic("queries")
    sent = case.client.send(
        *({"topic": topic, "body": b"%d" % number, "keys": f"all only-{number}"} for number in range(5))
    )
    case.client.read(topic, 5, _TIMEOUT_MS)

    by_offset_msg_id = [case.client.by_id(topic, result["offset_msg_id"]).body for result in sent]
    by_msg_id = case.client.by_id(topic, sent[2]["msg_id"])
    by_key = [message.body for message in case.client.by_key(topic, "only-3")]
    by_shared_key = sorted(message.body for message in case.client.by_key(topic, "all"))

    assert by_offset_msg_id == [b"0", b"1", b"2", b"3", b"4"]
    assert (by_msg_id.body, by_msg_id.keys) == (b"2", "all only-2")
    assert by_key == [b"3"]
    assert by_shared_key == [b"0", b"1", b"2", b"3", b"4"]


# --- transactions ------------------------------------------------------------------------------------


def test_a_message_is_visible_after_its_transaction_commits(case: Case) -> None:
    topic = case.topic("transactions")
    send = {"topic": topic, "tags": "t", "keys": "k"}

    committed = case.client.transaction(send | {"body": b"committed"}, "commit")
    rolled_back = case.client.transaction(send | {"body": b"rolled back"}, "rollback")

    case.client.send({"topic": topic, "body": b"after them"})
    found = {message.body: message for message in case.client.read(topic, 2, _TIMEOUT_MS)}
    assert (committed["local_state"], rolled_back["local_state"]) == ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE")
    assert set(found) == {b"committed", b"after them"}
    assert found[b"committed"].msg_id == committed["msg_id"]
    assert (found[b"committed"].tags, found[b"committed"].keys) == ("t", "k")


def test_an_open_transaction_is_checked_until_its_state_is_known(case: Case) -> None:
    topic = case.topic("checked")

    committed = case.client.transaction({"topic": topic, "body": b"committed"}, "unknown", ["unknown", "commit"])
    case.client.transaction({"topic": topic, "body": b"rolled back"}, "unknown", ["rollback"])

    [found] = case.client.read(topic, 1, _TIMEOUT_MS)
    checks = [check for check in case.client.checks(0, 0) if check.properties["REAL_TOPIC"] == topic]
    assert found.body == b"committed"
    assert found.msg_id == committed["msg_id"]
    assert Counter(check.body for check in checks) == {b"committed": 2, b"rolled back": 1}
