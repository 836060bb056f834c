"""RocketMQ's own tools, unmodified, look at our server and change it."""

from __future__ import annotations

import pytest

from tests.conformance.java_clients import Case

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_PATIENCE_MS = 20_000


def _ask(newest: Case, *arguments: str) -> list[list[str]]:
    """What a tool prints, as the words of its lines."""
    printed = newest.tools.mqadmin(*arguments, "-n", newest.server.address)
    return [line.split() for line in printed.splitlines() if line.strip()]


def test_cluster_list_names_the_broker_and_where_it_is(newest: Case) -> None:
    rows = _ask(newest, "clusterList")

    [row] = [row for row in rows if row[:2] == ["DefaultCluster", "broker-a"]]
    assert row[2] == "0"
    assert row[3].startswith("127.0.0.1:")


def test_topics_are_made_listed_and_changed(newest: Case) -> None:
    made = _ask(newest, "updateTopic", "-c", "DefaultCluster", "-t", "made-by-tools", "-r", "3", "-w", "3")
    changed = _ask(newest, "updateTopic", "-c", "DefaultCluster", "-t", "made-by-tools", "-r", "5", "-w", "5")

    listed = _ask(newest, "topicList")
    newest.client.send({"topic": "made-by-tools", "body": b"first", "queue_id": 4})
    status = _ask(newest, "topicStatus", "-t", "made-by-tools")
    assert "success." in made[0]
    assert "success." in changed[0]
    assert ["made-by-tools"] in listed
    assert [row[:4] for row in status if row[0] == "broker-a"] == [
        ["broker-a", str(queue_id), "0", str(int(queue_id == 4))] for queue_id in range(5)
    ]


def test_consumer_progress_tells_what_a_group_has_left(newest: Case) -> None:
    topic, group = newest.topic("progress"), newest.group("progress")
    newest.client.send({"topic": topic, "body": b"first"})
    newest.client.send(*({"topic": topic, "body": b"%d" % number, "queue_id": 0} for number in range(6)))
    newest.client.consume(group, topic, 7, _PATIENCE_MS)
    newest.client.send(*({"topic": topic, "body": b"%d" % number, "queue_id": 2} for number in range(3)))

    rows = _ask(newest, "consumerProgress", "-g", group)

    of_topic = {row[2]: row for row in rows if row[0] == topic}
    assert set(of_topic) == {"0", "1", "2", "3"}
    assert sum(int(row[3]) - int(row[4]) for row in of_topic.values()) == 3
    assert ["Diff", "Total:", "3"] in [row[-3:] for row in rows] or any("3" in row[-1] for row in rows[-2:])


def test_messages_are_found_by_id_and_by_key(newest: Case) -> None:
    topic = newest.topic("tools-queries")
    sent = newest.client.send({"topic": topic, "body": b"wanted", "tags": "paid", "keys": "key-7"})[0]
    newest.client.read(topic, 1, _PATIENCE_MS)

    by_id = _ask(newest, "queryMsgById", "-t", topic, "-i", sent["offset_msg_id"])
    by_key = _ask(newest, "queryMsgByKey", "-t", topic, "-k", "key-7")

    told = {row[0]: row[-1] for row in by_id}
    assert told["Topic:"] == topic
    assert told["Tags:"] == "[paid]"
    assert told["Keys:"] == "[key-7]"
    assert [row[:3] for row in by_key if row[0] == sent["msg_id"]] == [
        [sent["msg_id"], str(sent["queue_id"]), str(sent["queue_offset"])]
    ]


def test_broker_status_is_a_table_of_figures(newest: Case) -> None:
    [cluster] = [row for row in _ask(newest, "clusterList") if row[:2] == ["DefaultCluster", "broker-a"]]

    status = {row[0]: row[-1] for row in _ask(newest, "brokerStatus", "-b", cluster[3])}

    assert int(status["msgPutTotalTodayNow"]) >= 0
    assert {"brokerVersionDesc", "putTps", "commitLogMaxOffset"} <= set(status)
