"""Acknowledgements of popped messages, and changes of their invisible time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import BatchAckMessageRequestBody
from tests.server.processors.pop_commands import GROUP, TOPIC, PopClient, Popped, bodies
from tests.server.serving import Serving

INVALID_HANDLE = (
    "receipt handle '0 1 2' is not valid; a handle has at least 8 parts with a blank between them, and is passed as it "
    "was received"
)
RETRY = f"%RETRY%{GROUP}_{TOPIC}"


@pytest.fixture
def client(serving: Serving) -> PopClient:
    serving.engine.create_topic(TOPIC, 1)
    return PopClient(serving)


def popped(serving: Serving, client: PopClient, *texts: bytes, **fields: Any) -> list[Popped]:
    """Send messages and pop them."""
    for text in texts:
        serving.send(TOPIC, text)
    found = client.pop(**{"invisible_time": 10_000, **fields})
    assert bodies(found) == sorted(texts)
    return found


def committed(serving: Serving, topic: str = TOPIC) -> int | None:
    return serving.engine.engine.offsets.offset(GROUP, topic, 0)


# --- acknowledgements -------------------------------------------------------------------------------


def test_an_acknowledged_message_does_not_come_again(serving: Serving, client: PopClient) -> None:
    one, two = popped(serving, client, b"one", b"two")

    client.ack(one)
    serving.advance(10_000)

    assert bodies(client.pop()) == [b"two"]
    assert two.body == b"two"


def test_the_committed_offset_is_the_first_one_without_an_acknowledgement(serving: Serving, client: PopClient) -> None:
    one, two, three = popped(serving, client, b"one", b"two", b"three")

    offsets = []
    for each in (two, one, three):
        client.ack(each)
        offsets.append(committed(serving))

    assert offsets == [0, 2, 3]


def test_a_repeated_acknowledgement_is_a_success(serving: Serving, client: PopClient) -> None:
    """Its response may have been lost."""
    (one,) = popped(serving, client, b"one")

    client.ack(one, one)


def test_a_retry_is_acknowledged_in_its_own_topic(serving: Serving, client: PopClient) -> None:
    popped(serving, client, b"one")
    serving.advance(10_000)
    (again,) = client.pop(invisible_time=10_000)

    client.ack(again)
    serving.advance(10_000)

    assert client.pop() == []
    assert (committed(serving), committed(serving, RETRY)) == (1, 1)


def test_a_late_acknowledgement_does_not_end_the_newer_delivery(serving: Serving, client: PopClient) -> None:
    """The client learns that the message will be handled again."""
    (first,) = popped(serving, client, b"one", order=True)
    serving.advance(10_000)
    (second,) = client.pop(order=True)

    late = client.send_ack(first)

    assert late.code == ResponseCode.NO_MESSAGE
    assert late.remark == (
        f"the delivery of {first.extra_info.split(' ')[1]} has ended: the invisible time is over, and the message was "
        "or will be delivered again; its new handle is needed"
    )
    client.ack(second)


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        (
            {"topic": "nowhere"},
            ResponseCode.TOPIC_NOT_EXIST,
            "topic 'nowhere' does not exist; create it with mqadmin updateTopic",
        ),
        ({"queue_id": 1}, ResponseCode.MESSAGE_ILLEGAL, "the queue ID of topic 'orders' must be 0..0, got 1"),
        ({"queue_id": -1}, ResponseCode.MESSAGE_ILLEGAL, "the queue ID of topic 'orders' must be 0..0, got -1"),
        ({"offset": 2}, ResponseCode.NO_MESSAGE, "offset 2 is not stored, queue 0 of 'orders' has 0..1"),
        ({"offset": -1}, ResponseCode.NO_MESSAGE, "offset -1 is not stored, queue 0 of 'orders' has 0..1"),
        (
            {"extra_info": "0 1 2"},
            ResponseCode.MESSAGE_ILLEGAL,
            INVALID_HANDLE,
        ),
        (
            {"extra_info": "0 1 60000 0 0 broker-b 0 0"},
            ResponseCode.INVALID_PARAMETER,
            "the message was popped from broker 'broker-b', this is 'broker-a'; send the request there",
        ),
    ],
)
def test_an_acknowledgement_that_is_not_valid_is_refused(
    serving: Serving, client: PopClient, fields: dict[str, Any], code: ResponseCode, remark: str
) -> None:
    (one,) = popped(serving, client, b"one")

    responses = [client.send_ack(one, **fields), client.send_change(one, 1_000, **fields)]

    assert [(each.code, each.remark) for each in responses] == [(code, remark)] * 2
    assert committed(serving) == 0


# --- durability -------------------------------------------------------------------------------------


def test_an_acknowledgement_that_is_not_durable_is_answered_with_the_error(
    serving: Serving, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash the message could come again, so its client must not take it for done."""
    one, two, three = popped(serving, client, b"one", b"two", b"three")

    def refuse() -> int:
        raise StoreError("the disk refused")

    with monkeypatch.context() as patch:
        patch.setattr(serving.engine.store.group_commit, "_flush", refuse)
        replies = [client.send_ack(one), client.send_change(two, 20_000), client.ack_all([three])]

    assert {each.code for each in replies} == {ResponseCode.SYSTEM_ERROR}
    assert all("the disk refused" in (each.remark or "") for each in replies)


def test_acknowledgements_and_times_survive_a_restart(tmp_path: Path) -> None:
    """A handle from before the restart is valid after it."""
    clock = VirtualClock()
    with Serving(engine=EmbeddedBroker(tmp_path, EmbeddedSettings(), clock)) as serving:
        serving.engine.create_topic(TOPIC, 1)
        client = PopClient(serving)
        one, two, three = sorted(popped(serving, client, b"1", b"2", b"3"), key=lambda each: each.body)
        client.ack(one)
        later = client.change(two, 30_000)

    with Serving(engine=EmbeddedBroker(tmp_path, EmbeddedSettings(), clock)) as serving:
        client = PopClient(serving)
        client.ack(later)
        serving.advance(30_000)

        assert bodies(client.pop()) == [three.body]


# --- several at once --------------------------------------------------------------------------------


def test_one_request_acknowledges_messages_of_several_pops(serving: Serving, client: PopClient) -> None:
    first = popped(serving, client, b"one", b"two", b"three")
    serving.advance(10_000)
    retries = client.pop(invisible_time=10_000)
    second = popped(serving, client, b"four")

    response = client.ack_all([*retries[:2], *second])
    serving.advance(10_000)

    assert response.code == ResponseCode.SUCCESS
    assert bodies(client.pop()) == [retries[2].body]
    assert len(first) == 3


def test_messages_that_are_not_stored_are_left_out(serving: Serving, client: PopClient) -> None:
    """As in RocketMQ: the other messages are acknowledged."""
    found = popped(serving, client, b"one")

    responses = [client.ack_all(found, start_offset=-1), client.ack_all(found, queue_id=7), client.ack_all(found)]

    assert [each.code for each in responses] == [ResponseCode.SUCCESS] * 3
    assert committed(serving) == 1


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({"bit_set": "?"}, "b is not Base64: Only base64 data is allowed"),
        (
            {"bit_set": "/" * 4 * 43_691},
            "b has 131073 bytes, allowed are 131072; acknowledge only what one pop returned",
        ),
    ],
)
def test_bits_that_cannot_be_read_are_refused(
    serving: Serving, client: PopClient, fields: dict[str, Any], remark: str
) -> None:
    found = popped(serving, client, b"one")

    response = client.ack_all(found, **fields)

    assert (response.code, response.remark) == (ResponseCode.INVALID_PARAMETER, remark)


def test_a_request_without_messages_is_refused(client: PopClient) -> None:
    body = BatchAckMessageRequestBody(broker_name="broker-a").encode()

    response = client.answer(RequestCode.BATCH_ACK_MESSAGE, body=body)

    assert (response.code, response.remark) == (ResponseCode.NO_MESSAGE, "the request acknowledges no message")


def test_one_request_acknowledges_a_limited_number_of_messages(serving: Serving, client: PopClient) -> None:
    serving.engine.create_topic(TOPIC, 1)
    for _ in range(9):
        serving.send_batch(TOPIC, *[Message(TOPIC, b"x") for _ in range(500)])
    found = client.pop(max_msg_nums=1)

    response = client.ack_all(found, bit_set="/" * 4 * 200)

    assert (response.code, response.remark) == (
        ResponseCode.INVALID_PARAMETER,
        "one request may acknowledge 4096 messages, this one has 4500; send several",
    )


# --- changes of the invisible time ------------------------------------------------------------------


def test_a_change_extends_the_time_from_now(serving: Serving, client: PopClient) -> None:
    (one,) = popped(serving, client, b"one")
    serving.advance(9_000)

    client.change(one, 5_000)

    serving.advance(4_999)
    assert client.pop() == []
    serving.advance(1)
    assert bodies(client.pop()) == [b"one"]


def test_the_message_is_acknowledged_with_its_new_handle(serving: Serving, client: PopClient) -> None:
    (one,) = popped(serving, client, b"one")
    serving.advance(1_000)
    changed = client.change(one, 20_000)

    client.ack(changed)

    assert changed.extra_info != one.extra_info
    assert committed(serving) == 1


def test_a_failed_message_is_visible_after_the_delay_that_its_consumer_chose(
    serving: Serving, client: PopClient
) -> None:
    (one,) = popped(serving, client, b"one")

    client.change(one, 0)
    serving.step()

    assert [(each.body, each.count) for each in client.pop()] == [(b"one", 1)]


def test_a_suspended_message_is_delivered_again_without_another_attempt(serving: Serving, client: PopClient) -> None:
    (one,) = popped(serving, client, b"one")

    client.change(one, 1_000, suspend=True)
    serving.advance(1_000)

    assert [(each.body, each.count) for each in client.pop()] == [(b"one", 0)]


def test_an_ordered_message_keeps_its_pop_time(serving: Serving, client: PopClient) -> None:
    """As in RocketMQ: the handles of the other messages of the pop stay valid too."""
    (one,) = popped(serving, client, b"one", order=True)
    serving.advance(1_000)

    changed = client.change(one, 20_000)

    assert changed.extra_info.split(" ")[1:4] == [one.extra_info.split(" ")[1], "21000", "999"]
    client.ack(changed)
    assert committed(serving) == 1


def test_a_change_after_the_invisible_time_is_refused(serving: Serving, client: PopClient) -> None:
    (one,) = popped(serving, client, b"one")
    serving.advance(10_000)

    response = client.send_change(one, 1_000)

    assert response.code == ResponseCode.NO_MESSAGE
    assert "its new handle is needed" in (response.remark or "")


@pytest.mark.parametrize("invisible_ms", [-1, 365 * 86_400_000 + 1])
def test_an_invisible_time_out_of_range_is_refused(serving: Serving, client: PopClient, invisible_ms: int) -> None:
    (one,) = popped(serving, client, b"one")

    response = client.send_change(one, invisible_ms)

    assert (response.code, response.remark) == (
        ResponseCode.INVALID_PARAMETER,
        f"invisibleTime must be 0..31536000000 ms, got {invisible_ms}",
    )


# --- queues that are removed meanwhile --------------------------------------------------------------


def test_a_message_of_a_removed_queue_can_be_acknowledged_and_changed(serving: Serving, client: PopClient) -> None:
    """RocketMQ refuses the acknowledgement, so that the message comes again."""
    topics = serving.engine.engine.topics
    topics.update(TOPIC, {"readQueueNums": 4, "writeQueueNums": 4})
    for queue_id in range(4):
        serving.send(TOPIC, str(queue_id).encode(), queue_id=queue_id)
    found = sorted(client.pop(invisible_time=10_000), key=lambda each: each.body)
    topics.update(TOPIC, {"readQueueNums": 1, "writeQueueNums": 1})

    client.ack(found[0], found[1])
    assert client.ack_all([found[2]]).code == ResponseCode.SUCCESS
    assert client.send_change(found[3], 20_000).code == ResponseCode.SUCCESS

    serving.advance(10_000)
    assert bodies(client.pop()) == []
    serving.advance(10_000)
    assert bodies(client.pop()) == [b"3"]


def test_a_queue_that_the_group_never_read_is_refused(serving: Serving, client: PopClient) -> None:
    (one,) = popped(serving, client, b"one")

    response = client.send_ack(one, queue_id=1)

    assert (response.code, response.remark) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "the queue ID of topic 'orders' must be 0..0, got 1",
    )
