"""Requests about POP without popping, and tools of administrators for groups that pop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerConnection, ConsumeStats, ConsumeStatsList, OffsetWrapper
from mqtemplate.remoting.protocol.headers.admin import TopicNameRequestHeader
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetConsumeStatsInBrokerHeader,
    GetConsumeStatsRequestHeader,
    ResetOffsetRequestHeader,
)
from mqtemplate.remoting.protocol.headers.pop import PopMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from tests.server.processors.pop_commands import GROUP, TOPIC, PopClient, bodies
from tests.server.serving import Serving

RETRY = f"%RETRY%{GROUP}_{TOPIC}"


@pytest.fixture
def client(serving: Serving) -> PopClient:
    serving.engine.create_topic(TOPIC, 1)
    return PopClient(serving)


def send(serving: Serving, *texts: bytes, topic: str = TOPIC) -> None:
    for text in texts:
        serving.send(topic, text)


# --- peek -------------------------------------------------------------------------------------------


def peeked(response: RemotingCommand) -> list[bytes]:
    assert response.code == ResponseCode.SUCCESS, response
    return [message.body for message in decode_messages(response.body, "broker-a")]


def test_a_peek_returns_what_a_pop_would_and_changes_nothing(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two", b"three")
    client.pop(max_msg_nums=1)

    first, again = client.peek(), client.peek(max_msg_nums=1)

    assert (peeked(first), peeked(again)) == ([b"two", b"three"], [b"two"])
    assert first.header(PopMessageResponseHeader).rest_num == 2
    assert bodies(client.pop()) == [b"three", b"two"]


def test_a_peek_sees_messages_that_were_not_acknowledged_in_time(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop(invisible_time=1_000)
    serving.advance(1_000)

    assert peeked(client.peek()) == [b"one"]


def test_a_peek_without_messages_finds_nothing(client: PopClient) -> None:
    response = client.peek()

    assert (response.code, response.remark) == (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")


def test_a_peek_of_too_many_messages_is_refused(client: PopClient) -> None:
    response = client.peek(max_msg_nums=33)

    assert (response.code, response.remark) == (
        ResponseCode.INVALID_PARAMETER,
        "maxMsgNums must be 1..32, got 33",
    )


# --- notification -----------------------------------------------------------------------------------


def test_a_notification_is_answered_at_once_if_there_are_messages(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")

    header = client.notification()

    assert header is not None
    assert header.has_msg
    assert bodies(client.pop()) == [b"one"]


def test_a_notification_waits_for_the_next_message(serving: Serving, client: PopClient) -> None:
    assert client.notification() is None
    send(serving, b"other", topic="invoices")
    serving.step()
    before = len(client.connection.replies)

    send(serving, b"one")
    serving.step()

    assert before == 0
    assert [reply.ext_fields for reply in client.connection.replies] == [{"hasMsg": "true", "pollingFull": "false"}]
    assert bodies(client.pop()) == [b"one"]


def test_a_notification_waits_for_a_message_that_is_visible_again(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop(invisible_time=2_000)
    other = PopClient(serving)
    assert other.notification() is None

    serving.advance(2_000)

    assert [reply.ext_fields["hasMsg"] for reply in other.connection.replies] == ["true"]


def test_a_notification_without_messages_ends_after_its_time(serving: Serving, client: PopClient) -> None:
    client.notification(poll_time=3_000)

    serving.advance(3_000)

    assert [reply.ext_fields["hasMsg"] for reply in client.connection.replies] == ["false"]


def test_an_ordered_notification_waits_for_the_acknowledgement(serving: Serving, client: PopClient) -> None:
    """The next message of the queue is blocked until then."""
    send(serving, b"one", b"two")
    first = client.pop(order=True, max_msg_nums=1)
    other = PopClient(serving)
    assert other.notification(order=True) is None

    client.ack(*first)
    serving.advance(1_000)

    assert [reply.ext_fields["hasMsg"] for reply in other.connection.replies] == ["true"]


def test_the_notification_of_a_closed_connection_is_dropped(serving: Serving, client: PopClient) -> None:
    client.notification()
    serving.disconnect(client.connection)

    send(serving, b"one")
    serving.step()

    assert client.connection.replies == []


def test_a_stop_of_the_server_answers_the_notifications(serving: Serving, client: PopClient) -> None:
    client.notification()

    serving.server.stop(0)

    assert [reply.ext_fields["hasMsg"] for reply in client.connection.replies] == ["false"]


# --- held pops --------------------------------------------------------------------------------------


def test_the_number_of_held_pops_counts_by_group_and_queue(serving: Serving, client: PopClient) -> None:
    client.send_pop()
    PopClient(serving).send_pop()
    PopClient(serving).send_pop(queue_id=0)

    assert (client.held(-1), client.held(0), client.held(-1, "audit")) == (2, 1, 0)


# --- progress ---------------------------------------------------------------------------------------


def stats(serving: Serving, **fields: Any) -> dict[tuple[str, int], OffsetWrapper]:
    header = GetConsumeStatsRequestHeader(consumer_group=GROUP, **fields)
    response = serving.request(RequestCode.GET_CONSUME_STATS, header)
    assert response is not None
    table = ConsumeStats.decode(response.body).offset_table
    return {(queue.topic, queue.queue_id): offsets for queue, offsets in table.items()}


def test_the_statistics_of_a_group_show_the_messages_in_flight(serving: Serving, client: PopClient) -> None:
    """Tools show the difference between the pulled and the committed offset as in flight."""
    send(serving, b"one", b"two", b"three", b"four")
    first = client.pop(max_msg_nums=3)
    client.ack(first[0])

    offsets = stats(serving, topic=TOPIC)[TOPIC, 0]

    assert (offsets.broker_offset, offsets.consumer_offset, offsets.pull_offset) == (4, 1, 3)


def test_the_statistics_have_the_retries_of_the_group(serving: Serving, client: PopClient) -> None:
    """Also while a member is connected that subscribes to the real topic."""
    serving.heartbeat(GROUP, TOPIC)
    send(serving, b"one")
    client.pop(invisible_time=1_000)
    serving.advance(1_000)
    client.pop()

    found = {queue: (each.consumer_offset, each.pull_offset) for queue, each in stats(serving).items()}

    assert found == {(TOPIC, 0): (1, 1), (RETRY, 0): (0, 1)}


def test_the_statistics_of_the_broker_have_the_groups_that_pop(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop()

    response = serving.request(RequestCode.GET_BROKER_CONSUME_STATS, GetConsumeStatsInBrokerHeader(is_order=False))

    assert response is not None
    (by_group,) = [each for each in ConsumeStatsList.decode(response.body).consume_stats_list if GROUP in each]
    (table,) = [each.offset_table for each in by_group[GROUP]]
    assert table[MessageQueue(TOPIC, "broker-a", 0)].pull_offset == 1


def test_a_member_that_pops_is_a_connected_consumer(serving: Serving, client: PopClient) -> None:
    serving.heartbeat(GROUP, TOPIC, client_id="pop@1", over=client.connection)

    response = serving.request(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequestHeader(consumer_group=GROUP)
    )

    assert response is not None
    connection = ConsumerConnection.decode(response.body)
    assert [each.client_id for each in connection.connection_set] == ["pop@1"]
    assert set(connection.subscription_table) == {TOPIC, f"%RETRY%{GROUP}"}


# --- changes ----------------------------------------------------------------------------------------


def reset(serving: Serving, timestamp: int) -> None:
    header = ResetOffsetRequestHeader(topic=TOPIC, group=GROUP, timestamp=timestamp, is_force=True)
    response = serving.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS, response


def test_after_a_reset_a_group_pops_from_the_new_offset(serving: Serving, client: PopClient) -> None:
    """Messages in flight are visible again, and their handles are not valid any more."""
    send(serving, b"one", b"two")
    one, two = sorted(client.pop(), key=lambda popped: popped.body)
    client.ack(one)

    reset(serving, 0)
    serving.advance(1)
    again = client.pop()

    assert bodies(again) == [b"one", b"two"]
    assert client.send_ack(two).code == ResponseCode.NO_MESSAGE
    assert stats(serving, topic=TOPIC)[TOPIC, 0].consumer_offset == 0


def test_after_a_reset_to_the_end_a_group_pops_new_messages_only(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop(invisible_time=1_000)

    reset(serving, -1)
    serving.advance(1_000)
    send(serving, b"two")

    assert bodies(client.pop()) == [b"two"]


def test_a_reset_serves_the_pops_that_wait(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.ack(*client.pop())
    client.send_pop()

    reset(serving, 0)
    serving.step()

    assert bodies(client.received()) == [b"one"]


def test_a_deleted_topic_has_no_deliveries_and_no_retries(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop(invisible_time=1_000)
    serving.advance(1_000)
    client.pop(invisible_time=1_000)

    serving.request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=TOPIC))
    serving.advance(1_000)

    assert serving.server.topics.find(RETRY) is None
    assert serving.engine.engine.pop.in_flight(GROUP) == []
    refused = client.send_pop()
    assert refused is not None
    assert refused.code == ResponseCode.TOPIC_NOT_EXIST


def test_a_pop_that_waits_ends_if_its_topic_is_deleted(serving: Serving, client: PopClient) -> None:
    client.send_pop(poll_time=5_000)

    serving.request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=TOPIC))
    serving.advance(5_000)

    assert [reply.code for reply in client.connection.replies] == [ResponseCode.POLLING_TIMEOUT]


def test_a_deleted_group_has_no_deliveries(serving: Serving, client: PopClient) -> None:
    """A message of the deleted group does not go to its retry topic."""
    send(serving, b"one")
    client.pop(invisible_time=1_000)
    header = DeleteSubscriptionGroupRequestHeader(group_name=GROUP, clean_offset=True)

    serving.request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
    serving.advance(1_000)

    assert serving.engine.engine.pop.in_flight(GROUP) == []
    assert serving.server.topics.find(RETRY) is None


# --- one group that pops and pulls in turns -----------------------------------------------------------


def test_a_group_continues_by_pull_where_its_pops_have_acknowledged(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two", b"three")
    client.ack(*client.pop(max_msg_nums=2))
    serving.heartbeat(GROUP, TOPIC)
    offset = serving.engine.engine.offsets.offset(GROUP, TOPIC, 0)

    pulled = serving.pull(GROUP, TOPIC, offset or 0)

    assert offset == 2
    assert pulled is not None
    assert [message.body for message in decode_messages(pulled.body, "broker-a")] == [b"three"]


def test_a_group_continues_by_pop_where_its_pulls_have_committed(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two", b"three")
    client.ack(*client.pop(max_msg_nums=1))
    serving.engine.engine.offsets.commit(GROUP, TOPIC, 0, 2)

    assert bodies(client.pop()) == [b"three"]


# --- the share of the pops with priorities ----------------------------------------------------------


def update_group(serving: Serving, **attributes: str) -> RemotingCommand:
    body = json.dumps({"groupName": GROUP, "attributes": attributes}).encode()
    response = serving.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    assert response is not None
    return response


def test_an_administrator_lets_a_share_of_the_pops_ignore_the_priorities(serving: Serving, client: PopClient) -> None:
    """The names of changed attributes have a sign, as mqadmin sends them; the others stay."""
    groups = serving.server.core.creations.groups
    serving.engine.engine.topics.update(
        TOPIC, {"readQueueNums": 2, "writeQueueNums": 2, "attributes": {"message.type": "PRIORITY"}}
    )
    for priority in ("0", "1"):
        for _ in range(20):
            serving.send(TOPIC, priority.encode(), {"_SYS_MSG_PRIORITY_": priority})

    assert update_group(serving, **{"+priority.factor": "0", "+note": "x"}).code == ResponseCode.SUCCESS
    found = {body for _ in range(20) for body in bodies(client.pop(max_msg_nums=1))}
    assert update_group(serving, **{"-priority.factor": ""}).code == ResponseCode.SUCCESS
    urgent = [bodies(client.pop(max_msg_nums=1)) for _ in range(5)]

    assert (found, urgent) == ({b"0", b"1"}, [[b"1"]] * 5)
    config = groups.find(GROUP)
    assert config is not None
    assert config.attributes == {"note": "x"}


@pytest.mark.parametrize("factor", ["101", "-1", "half"])
def test_a_share_out_of_range_is_refused(serving: Serving, factor: str) -> None:
    response = update_group(serving, **{"+priority.factor": factor})

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark == f"the group attribute priority.factor must be 0..100, got {factor!r}"
