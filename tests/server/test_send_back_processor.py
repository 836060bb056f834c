"""A message that a consumer gave back: again later, or never again."""

from __future__ import annotations

import zlib

import pytest

from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import Serving

TEN_SECONDS = 10_000  # level 3, the first retry


@pytest.fixture
def serving():
    with Serving() as serving:
        serving.heartbeat("billing", "orders")
        yield serving


def send_back(serving: Serving, message: MessageExt, delay_level: int = 0, most: int | None = None) -> RemotingCommand:
    header = ConsumerSendMsgBackRequestHeader(
        offset=message.physical_offset,
        group="billing",
        delay_level=delay_level,
        origin_msg_id=message.msg_id,
        origin_topic=message.topic,
        max_reconsume_times=most,
    )
    answer = serving.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert answer is not None
    return answer


def test_it_comes_again_in_the_retry_topic_after_its_level(serving: Serving) -> None:
    serving.send("orders", b"hard", {"UNIQ_KEY": "0A", "TAGS": "paid", "own": "x"}, flag=3)
    (message,) = serving.read("orders")

    answer = send_back(serving, message)

    assert (answer.code, answer.ext_fields) == (ResponseCode.SUCCESS, {})
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


def test_a_compressed_body_goes_on_as_it_is(serving: Serving) -> None:
    body = zlib.compress(b"x" * 5_000)
    serving.send("orders", body, sys_flag=0x301)

    send_back(serving, serving.read("orders")[0])
    serving.advance(TEN_SECONDS)

    (again,) = serving.read("%RETRY%billing")
    assert again.body == b"x" * 5_000
    record = serving.engine.store.read_at(again.physical_offset)
    assert record is not None
    assert (record.body, record.sys_flag) == (body, 0x301)


def test_each_retry_waits_a_level_longer_and_names_the_first_message(serving: Serving) -> None:
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


def test_the_consumer_may_choose_the_level(serving: Serving) -> None:
    serving.send("orders", b"hard")

    send_back(serving, serving.read("orders")[0], delay_level=1)
    serving.advance(1_000)

    assert len(serving.read("%RETRY%billing")) == 1


@pytest.mark.parametrize(("delay_level", "most"), [(-1, 16), (0, 0)])
def test_what_may_not_come_again_is_a_dead_letter_at_once(serving: Serving, delay_level: int, most: int) -> None:
    serving.send("orders", b"hopeless", {"UNIQ_KEY": "0A"})
    (message,) = serving.read("orders")

    assert send_back(serving, message, delay_level, most).code == ResponseCode.SUCCESS

    (dead,) = serving.read("%DLQ%billing")
    assert (dead.body, dead.msg_id) == (b"hopeless", "0A")
    assert dead.properties["DLQ_ORIGIN_TOPIC"] == "orders"
    config = serving.engine.topics.config("%DLQ%billing")
    assert config is not None
    assert (config["writeQueueNums"], config["perm"]) == (1, 6)


def test_the_groups_own_limit_holds_where_the_consumer_names_none(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_max_times=0)])
    serving.send("orders", b"hopeless")

    send_back(serving, serving.read("orders")[0])

    assert len(serving.read("%DLQ%billing")) == 1


def test_a_group_without_retry_queues_wants_no_retries(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_queue_nums=0)])
    serving.send("orders", b"hard")
    end = serving.engine.store.end_offset

    answer = send_back(serving, serving.read("orders")[0])

    assert (answer.code, serving.engine.store.end_offset) == (ResponseCode.SUCCESS, end)


def test_a_message_that_is_not_there_cannot_be_given_back(serving: Serving) -> None:
    serving.send("orders", b"hard")
    (message,) = serving.read("orders")
    message.physical_offset += 1

    answer = send_back(serving, message)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "no message begins at physical offset 1" in answer.remark


def test_a_group_that_nobody_made_is_made_or_gives_nothing_back() -> None:
    header = ConsumerSendMsgBackRequestHeader(offset=0, group="fresh", delay_level=1)
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as closed:
        closed.send("orders", b"hard")
        refused = closed.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    with Serving() as open_to_all:
        open_to_all.send("orders", b"hard")
        open_to_all.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        open_to_all.advance(1_000)
        again = open_to_all.read("%RETRY%fresh")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert [message.body for message in again] == [b"hard"]
