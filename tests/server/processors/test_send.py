"""Sending: long batches, and what needs more than a script. `scripts/` has the responses and the stored messages."""

from __future__ import annotations

import pytest

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import count_batch
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.core import sends
from mqtemplate.server.requests.deferred_work import DeferredWork
from tests.server.serving import Serving


def test_routes_and_new_topics_have_the_queue_number_of_the_settings() -> None:
    """A client sends to the queues in the route of TBW102 before the route of the new topic exists."""
    with Serving(BrokerServerSettings(default_topic_queue_nums=2)) as serving:
        route = serving.server.name_server.route("TBW102")
        response = serving.send("fresh", queue_id=1)

        assert route is not None
        assert route.queue_datas[0].write_queue_nums == serving.engine.topics.queue_count("fresh") == 2
        assert response.code == ResponseCode.SUCCESS


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_level_that_the_table_does_not_have_is_refused_with_a_remedy(serving: Serving, is_batch: bool) -> None:
    """RocketMQ's broker stores it with the highest level: two hours instead of an error."""
    if is_batch:
        response = serving.send_batch("orders", Message("orders", b"x"), Message("orders", b"y", {"DELAY": "99"}))
    else:
        response = serving.send("orders", properties={"DELAY": "99"})

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "the delay level must be 0..18 (1=1s 2=5s" in (response.remark or "")
    assert "got 99; 0 means no delay, " in (response.remark or "")
    assert "mqtemplate.broker.clamp-delay-level=true" in (response.remark or "")


def test_with_rocketmqs_rule_such_a_message_has_the_highest_level() -> None:
    with Serving(None, None, EmbeddedSettings(clamp_delay_level=True)) as serving:
        response = serving.send("orders", properties={"DELAY": "99"})

        assert response is not None
        assert response.code == ResponseCode.SUCCESS
        [pending] = serving.engine.delayed.pending(PendingQuery(topic="orders")).messages
        assert pending.delay_level == 18


def test_the_level_of_a_retry_is_limited(serving: Serving) -> None:
    """A client of RocketMQ sends a retry with the level 3 + the number of retries, which may be above the highest."""
    serving.heartbeat("billing", "orders")

    response = serving.send("%RETRY%billing", properties={"DELAY": "19"}, reconsume_times=16, max_reconsume_times=99)

    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    [pending] = serving.engine.delayed.pending(PendingQuery()).messages
    assert (pending.topic, pending.delay_level) == ("%RETRY%billing", 18)


@pytest.mark.parametrize(
    ("count", "size", "text"),
    [
        (11, 0, "has more than 10 messages; send fewer at once, or raise max-batch-messages"),
        (1, 301, "allowed are 300; send fewer messages at once"),
    ],
)
def test_a_batch_that_is_too_large_is_refused_before_it_is_read(
    count: int, size: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """700,000 empty messages, far more than max-message-size allows, held the I/O thread for 3.6 seconds."""
    monkeypatch.setattr(sends, "split_batch", lambda body: pytest.fail("it was read"))
    with Serving(BrokerServerSettings(max_batch_messages=10), None, EmbeddedSettings(max_message_size=300)) as serving:
        response = serving.send_batch("orders", *[Message("orders", bytes(size)) for _ in range(count)])

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert text in (response.remark or "")


@pytest.mark.parametrize(("count", "deferred"), [(64, 0), (65, 1)])
def test_a_long_batch_is_stored_in_another_thread(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, count: int, deferred: int
) -> None:
    serving.send("orders")
    runs: list[object] = []
    run = DeferredWork.run
    monkeypatch.setattr(DeferredWork, "run", lambda *arguments: runs.append(arguments) or run(*arguments))

    response = serving.send_batch("orders", *[Message("orders", b"x") for _ in range(count)])

    assert response is not None
    assert (response.code, len(runs)) == (ResponseCode.SUCCESS, deferred)
    assert serving.engine.reader.max_offset(MessageQueue("orders", "broker-a", 0)) == count + 1


@pytest.mark.parametrize(
    ("body", "count"),
    [(b"", 0), (bytes(21), 0), (bytes(22), 1), (b"\xff" * 44, 2), (b"\x7f" * 44, 1), (bytes(22 * 100), 6)],
)
def test_the_messages_of_a_malformed_batch_are_counted_without_reading_them(body: bytes, count: int) -> None:
    assert count_batch(body, 5) == count


# --- priorities ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "queue_id"),
    [
        ({"_SYS_MSG_PRIORITY_": "2"}, 2),
        ({"_SYS_MSG_PRIORITY_": "9"}, 3),
        ({"_SYS_MSG_PRIORITY_": "2", "UNIQ_KEY": "A1", "TAGS": "paid"}, 2),
        ({"_SYS_MSG_PRIORITY_": "-1"}, 1),
        ({"_SYS_MSG_PRIORITY_": "2", "__SHARDINGKEY": "4466"}, 1),
        ({"note": "_SYS_MSG_PRIORITY_"}, 1),
    ],
)
def test_a_priority_chooses_the_queue_whatever_the_client_chose(
    serving: Serving, properties: dict[str, str], queue_id: int
) -> None:
    """As RocketMQ's broker does for a topic of any type: the queue is the priority, at most the last one."""
    serving.engine.create_topic("jobs", 4)

    for _ in range(3):
        response = serving.send("jobs", b"x", properties, queue_id=1)
        assert response is not None
        assert response.header(SendMessageResponseHeader).queue_id == queue_id

    reader = serving.engine.engine.queues
    found, _ = reader.read(MessageQueue("jobs", serving.engine.name, queue_id), 0, 8, None)
    is_urgent = queue_id > 1
    assert [("_SYS_MSG_PRIORITY_" in message.properties) for message in found] == [is_urgent] * 3
