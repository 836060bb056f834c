"""Unmodified RocketMQ tools read and change the state of the server."""

from __future__ import annotations

import pytest

from tests.conformance.java_clients import Case

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TIMEOUT_MS = 20_000


def _rows(newest: Case, *arguments: str) -> list[list[str]]:
    """Return the words of each line that a tool prints."""
    printed = newest.tools.mqadmin(*arguments, "-n", newest.server.address)
    return [line.split() for line in printed.splitlines() if line.strip()]


def test_cluster_list_shows_the_broker_and_its_address(newest: Case) -> None:
    rows = _rows(newest, "clusterList")

    [row] = [row for row in rows if row[:2] == ["DefaultCluster", "broker-a"]]
    assert row[2] == "0"
    assert row[3].startswith("127.0.0.1:")


def test_topics_are_created_listed_and_changed(newest: Case) -> None:
    created = _rows(newest, "updateTopic", "-c", "DefaultCluster", "-t", "created-by-tools", "-r", "3", "-w", "3")
    changed = _rows(newest, "updateTopic", "-c", "DefaultCluster", "-t", "created-by-tools", "-r", "5", "-w", "5")

    listed = _rows(newest, "topicList")
    newest.client.send({"topic": "created-by-tools", "body": b"first", "queue_id": 4})
    status = _rows(newest, "topicStatus", "-t", "created-by-tools")
    assert "success." in created[0]
    assert "success." in changed[0]
    assert ["created-by-tools"] in listed
    assert [row[:4] for row in status if row[0] == "broker-a"] == [
        ["broker-a", str(queue_id), "0", str(int(queue_id == 4))] for queue_id in range(5)
    ]


def test_consumer_progress_shows_the_lag_of_a_group(newest: Case) -> None:
    topic, group = newest.topic("progress"), newest.group("progress")
    newest.client.send({"topic": topic, "body": b"first"})
    newest.client.send(*({"topic": topic, "body": b"%d" % number, "queue_id": 0} for number in range(6)))
    newest.client.consume(group, topic, 7, _TIMEOUT_MS)
    newest.client.send(*({"topic": topic, "body": b"%d" % number, "queue_id": 2} for number in range(3)))

    rows = _rows(newest, "consumerProgress", "-g", group)

    of_topic = {row[2]: row for row in rows if row[0] == topic}
    assert set(of_topic) == {"0", "1", "2", "3"}
    assert sum(int(row[3]) - int(row[4]) for row in of_topic.values()) == 3
    assert ["Diff", "Total:", "3"] in [row[-3:] for row in rows] or any("3" in row[-1] for row in rows[-2:])


def test_messages_are_found_by_offset_message_id_and_by_key(newest: Case) -> None:
    topic = newest.topic("tools-queries")
    sent = newest.client.send({"topic": topic, "body": b"wanted", "tags": "paid", "keys": "key-7"})[0]
    newest.client.read(topic, 1, _TIMEOUT_MS)

    by_id = _rows(newest, "queryMsgById", "-t", topic, "-i", sent["offset_msg_id"])
    by_key = _rows(newest, "queryMsgByKey", "-t", topic, "-k", "key-7")

    printed = {row[0]: row[-1] for row in by_id}
    assert printed["Topic:"] == topic
    assert printed["Tags:"] == "[paid]"
    assert printed["Keys:"] == "[key-7]"
    assert [row[:3] for row in by_key if row[0] == sent["msg_id"]] == [
        [sent["msg_id"], str(sent["queue_id"]), str(sent["queue_offset"])]
    ]


def test_broker_status_is_a_table_of_statistics(newest: Case) -> None:
    [cluster] = [row for row in _rows(newest, "clusterList") if row[:2] == ["DefaultCluster", "broker-a"]]

    status = {row[0]: row[-1] for row in _rows(newest, "brokerStatus", "-b", cluster[3])}

    assert int(status["msgPutTotalTodayNow"]) >= 0
    assert {"brokerVersionDesc", "putTps", "commitLogMaxOffset"} <= set(status)
