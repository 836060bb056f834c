"""Messages that a consumer sends back: they are retried, or become dead letters."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.protocol.messages import encode_properties_text
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import Serving

TEN_SECONDS = 10_000  # level 3, the first retry


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        serving.heartbeat("billing", "orders")
        yield serving


def send_back(
    serving: Serving,
    message: MessageExt,
    delay_level: int = 0,
    max_times: int | None = None,
    delay_ms: int | None = None,
    properties: dict[str, str] | None = None,
) -> RemotingCommand:
    header = ConsumerSendMsgBackRequestHeader(
        offset=message.physical_offset,
        group="billing",
        delay_level=delay_level,
        origin_msg_id=message.msg_id,
        origin_topic=message.topic,
        max_reconsume_times=max_times,
        delay_ms=delay_ms,
        properties=None if properties is None else encode_properties_text(properties),
    )
    response = serving.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert response is not None
    return response


def test_a_message_is_delivered_again_after_the_delay_of_its_level(serving: Serving) -> None:
    serving.send("orders", b"hard", {"UNIQ_KEY": "0A", "TAGS": "paid", "own": "x"}, flag=3)
    (message,) = serving.read("orders")

    response = send_back(serving, message)

    assert (response.code, response.ext_fields) == (ResponseCode.SUCCESS, {})
    serving.advance(TEN_SECONDS - 1)
    assert serving.read("%RETRY%billing") == []
    serving.advance(1)
    (again,) = serving.read("%RETRY%billing")
    assert (again.body, again.flag, again.tags, again.reconsume_times) == (b"hard", 3, "paid", 1)
    assert (again.msg_id, again.properties["own"]) == ("0A", "x")
    assert again.properties["RETRY_TOPIC"] == "orders"
    assert again.properties["ORIGIN_MESSAGE_ID"] == message.offset_msg_id
    assert again.properties["WAIT"] == "false"
    assert (again.born_timestamp, again.born_host) == (message.born_timestamp, message.born_host)


@pytest.mark.parametrize("delay_level", [0, 5])
def test_an_exact_delay_replaces_the_level(serving: Serving, delay_level: int) -> None:
    """Our own field: RocketMQ's brokers have levels only."""
    serving.send("orders", b"hard")
    (message,) = serving.read("orders")

    response = send_back(serving, message, delay_level, delay_ms=1_234)

    assert response.code == ResponseCode.SUCCESS
    serving.advance(1_233)
    assert serving.read("%RETRY%billing") == []
    serving.advance(1)
    (again,) = serving.read("%RETRY%billing")
    assert (again.body, again.reconsume_times) == (b"hard", 1)


@pytest.mark.parametrize(("delay_level", "topic"), [(0, "%RETRY%billing"), (-1, "%DLQ%billing")])
def test_a_message_gets_the_properties_of_the_request(serving: Serving, delay_level: int, topic: str) -> None:
    """Our own field. It cannot change the delay, nor add what only a broker may set."""
    serving.send("orders", b"hard", {"own": "x"})
    (message,) = serving.read("orders")
    added = {"dead_letter_message": "café", "TIMER_DELAY_MS": "99000000", "DELAY": "18", "POP_CK": "1"}

    send_back(serving, message, delay_level, properties=added)
    serving.advance(TEN_SECONDS)

    (again,) = serving.read(topic)
    assert (again.properties["dead_letter_message"], again.properties["own"]) == ("café", "x")
    assert "POP_CK" not in again.properties


def test_properties_without_room_refuse_the_request(serving: Serving) -> None:
    serving.send("orders", b"hard", {"own": "x" * 30_000})

    response = send_back(serving, serving.read("orders")[0], properties={"more": "y" * 3_000})

    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "32" in response.remark
    assert serving.read("%RETRY%billing") == []


def test_a_compressed_body_is_stored_unchanged(serving: Serving) -> None:
    body = zlib.compress(b"x" * 5_000)
    serving.send("orders", body, sys_flag=0x301)

    send_back(serving, serving.read("orders")[0])
    serving.advance(TEN_SECONDS)

    (again,) = serving.read("%RETRY%billing")
    assert again.body == b"x" * 5_000
    record = serving.engine.store.read_at(again.physical_offset)
    assert record is not None
    assert (record.body, record.sys_flag) == (body, 0x301)


def test_each_retry_has_the_next_level_and_the_id_of_the_first_message(serving: Serving) -> None:
    serving.send("orders", b"hard")
    (message,) = serving.read("orders")
    send_back(serving, message)
    serving.advance(TEN_SECONDS)
    (again,) = serving.read("%RETRY%billing")

    send_back(serving, again)

    serving.advance(29_999)
    assert len(serving.read("%RETRY%billing")) == 1
    serving.advance(1)
    third = serving.read("%RETRY%billing")[-1]
    assert third.reconsume_times == 2
    assert third.properties["RETRY_TOPIC"] == "orders"
    assert third.properties["ORIGIN_MESSAGE_ID"] == message.offset_msg_id


def test_the_consumer_can_choose_the_level(serving: Serving) -> None:
    serving.send("orders", b"hard")

    send_back(serving, serving.read("orders")[0], delay_level=1)
    serving.advance(1_000)

    assert len(serving.read("%RETRY%billing")) == 1


@pytest.mark.parametrize(("delay_level", "max_times"), [(-1, 16), (0, 0)])
def test_without_further_retries_a_message_is_a_dead_letter_at_once(
    serving: Serving, delay_level: int, max_times: int
) -> None:
    serving.send("orders", b"hopeless", {"UNIQ_KEY": "0A"})
    (message,) = serving.read("orders")

    assert send_back(serving, message, delay_level, max_times).code == ResponseCode.SUCCESS

    (dead,) = serving.read("%DLQ%billing")
    assert (dead.body, dead.msg_id) == (b"hopeless", "0A")
    assert dead.properties["DLQ_ORIGIN_TOPIC"] == "orders"
    config = serving.engine.topics.config("%DLQ%billing")
    assert config is not None
    assert (config["writeQueueNums"], config["perm"]) == (1, 6)


def test_the_maximum_of_the_group_is_the_default(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_max_times=0)])
    serving.send("orders", b"hopeless")

    send_back(serving, serving.read("orders")[0])

    assert len(serving.read("%DLQ%billing")) == 1


def test_a_group_without_retry_queues_has_no_retries(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_queue_nums=0)])
    serving.send("orders", b"hard")
    end = serving.engine.store.end_offset

    response = send_back(serving, serving.read("orders")[0])

    assert (response.code, serving.engine.store.end_offset) == (ResponseCode.SUCCESS, end)


def test_a_missing_message_cannot_be_sent_back(serving: Serving) -> None:
    serving.send("orders", b"hard")
    (message,) = serving.read("orders")
    message.physical_offset += 1

    response = send_back(serving, message)

    assert response.code == ResponseCode.SYSTEM_ERROR
    assert "no message starts at physical offset 1" in response.remark


def test_the_request_creates_a_missing_group_or_is_refused() -> None:
    header = ConsumerSendMsgBackRequestHeader(offset=0, group="fresh", delay_level=1)
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as without_creation:
        without_creation.send("orders", b"hard")
        refused = without_creation.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    with Serving() as with_creation:
        with_creation.send("orders", b"hard")
        with_creation.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        with_creation.advance(1_000)
        again = with_creation.read("%RETRY%fresh")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert [message.body for message in again] == [b"hard"]
