"""Clients: who is a member of what, what they want, and how the others hear of it."""

from __future__ import annotations

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol import LanguageCode, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    SubscriptionGroupConfig,
)
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader, UnregisterClientRequestHeader
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving, subscription


@pytest.fixture
def serving():
    with Serving() as serving:
        yield serving


def members(serving: Serving, group: str = "billing") -> list[str]:
    header = ConsumerGroupRequestHeader(consumer_group=group)
    answer = serving.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
    assert answer is not None
    if answer.code != ResponseCode.SUCCESS:
        return []
    return GetConsumerListByGroupResponseBody.decode(answer.body).consumer_id_list


def notices(connection: RecordingConnection) -> list[str]:
    """The groups that the client was told have changed."""
    assert all(push.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED for push in connection.pushed)
    assert all(push.is_one_way for push in connection.pushed)
    return [push.header(ConsumerGroupRequestHeader).consumer_group for push in connection.pushed]


# --- heartbeats --------------------------------------------------------------------------------------


def test_a_heartbeat_makes_a_member_before_it_is_answered(serving: Serving) -> None:
    """Trap 21: a client that does not find itself in the list gets no queue."""
    answer = serving.heartbeat("billing", "orders", client_id="10.0.0.1@7#8")

    assert (answer.code, answer.ext_fields, answer.body) == (ResponseCode.SUCCESS, {}, b"")
    assert members(serving) == ["10.0.0.1@7#8"]


def test_the_answer_tells_a_version_that_lets_clients_use_sql92(serving: Serving) -> None:
    """Trap 8."""
    assert serving.heartbeat("billing", "orders").version >= Version.V4_1_0_SNAPSHOT


def test_a_first_heartbeat_makes_the_group_and_its_retry_topic(serving: Serving) -> None:
    """Trap 22: before anything failed."""
    serving.heartbeat("billing", "orders")

    assert serving.server.groups.find("billing") == SubscriptionGroupConfig(group_name="billing")
    config = serving.engine.topics.config("%RETRY%billing")
    assert config is not None
    assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (1, 1, 6)


def test_the_retry_topic_has_as_many_queues_as_the_group_says(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_queue_nums=3)])

    serving.heartbeat("billing", "orders")

    assert serving.engine.topics.queue_count("%RETRY%billing") == 3


def test_without_auto_creation_an_unknown_group_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as serving:
        answer = serving.heartbeat("billing", "orders", producers=["shop"])

        assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert "set auto-create-subscription-group to true" in answer.remark
        assert members(serving) == []
        assert [channel.client_id for channel in serving.server.clients.producers("shop")] == ["client@1"]


@pytest.mark.parametrize("group", ["with blank", "g" * 249])
def test_a_group_with_an_illegal_name_is_refused_and_the_clients_others_are_taken(serving: Serving, group: str) -> None:
    """There would be no retry topic of that name."""
    consumers = [ConsumerData(group_name=name, subscription_data_set=[]) for name in (group, "billing")]
    beat = HeartbeatData(client_id="c1", consumer_data_set=consumers)

    answer = serving.ask(RequestCode.HEART_BEAT, None, beat.encode())

    assert answer is not None
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "is no name of a group; use at most 248 letters, digits" in answer.remark
    assert serving.server.groups.find(group) is None
    assert members(serving) == ["c1"]


def test_a_heartbeat_that_cannot_be_read_is_refused(serving: Serving) -> None:
    answer = serving.ask(RequestCode.HEART_BEAT, None, b"{")

    assert answer is not None
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_of_a_group_without_members_there_is_no_list(serving: Serving) -> None:
    answer = serving.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="nobody"))

    assert answer is not None
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "nobody consumes for group 'nobody'")


def test_the_registry_knows_what_a_client_said_of_itself(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", client_id="c1", producers=["shop"])

    channel = serving.server.clients.consumer("billing", "c1")
    assert channel is not None
    assert (channel.language, channel.version) == (LanguageCode.JAVA, Version.V5_5_0)
    assert channel.connection is serving.connection
    assert serving.server.clients.producer_by_client_id("c1") is not None
    assert serving.server.clients.next_producer("shop") is not None
    assert serving.server.clients.next_producer("nobody") is None
    assert serving.server.clients.groups_of_topic("orders") == ["billing"]


def test_producers_are_asked_in_turn(serving: Serving) -> None:
    for client_id in ("a", "b"):
        serving.heartbeat("any", client_id=client_id, producers=["shop"], over=RecordingConnection())

    asked = {serving.server.clients.next_producer("shop").client_id for _ in range(2)}

    assert asked == {"a", "b"}


# --- subscriptions -----------------------------------------------------------------------------------


def test_a_newer_subscription_takes_the_place_of_the_older_one(serving: Serving) -> None:
    """Trap 20: the numbers are the clients'."""
    serving.heartbeat("billing", "orders", expression="a", sub_version=5)
    serving.heartbeat("billing", "orders", expression="b", sub_version=4)
    assert serving.server.clients.subscription("billing", "orders").sub_string == "a"

    serving.heartbeat("billing", "orders", expression="c", sub_version=6)

    assert serving.server.clients.subscription("billing", "orders").sub_string == "c"


def test_a_topic_that_is_not_told_any_more_is_dropped(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", "invoices")

    serving.heartbeat("billing", "orders")

    assert serving.server.clients.subscription("billing", "invoices") is None


def test_a_heartbeat_that_leaves_the_subscriptions_out_does_not_drop_them(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    serving.heartbeat("billing", "invoices", without_sub=True)

    assert serving.server.clients.subscription("billing", "orders") is not None
    assert serving.server.clients.subscription("billing", "invoices") is None


@pytest.mark.parametrize(
    ("kind", "expression", "code"),
    [
        ("TAG", "a || b", ResponseCode.SUCCESS),
        ("SQL92", "price > 5 AND TAGS IS NOT NULL", ResponseCode.SUCCESS),
        ("SQL92", "price >", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
    ],
)
def test_a_consumer_asks_whether_its_expression_will_do(
    serving: Serving, kind: str, expression: str, code: int
) -> None:
    data = subscription("orders", expression, kind)
    body = CheckClientRequestBody(client_id="c1", group="billing", subscription_data=data).encode()

    answer = serving.ask(RequestCode.CHECK_CLIENT_CONFIG, None, body)

    assert answer is not None
    assert answer.code == code


def test_where_sql92_is_off_a_consumer_is_told_before_it_starts() -> None:
    data = subscription("orders", "price > 5", "SQL92")
    body = CheckClientRequestBody(client_id="c1", group="billing", subscription_data=data).encode()
    with Serving(BrokerServerSettings(enable_property_filter=False)) as serving:
        answer = serving.ask(RequestCode.CHECK_CLIENT_CONFIG, None, body)

    assert answer is not None
    assert answer.code == ResponseCode.SYSTEM_ERROR


# --- coming and going --------------------------------------------------------------------------------


def test_members_hear_of_each_other(serving: Serving) -> None:
    one, two = RecordingConnection(), RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="1", over=one)
    one.pushed.clear()

    serving.heartbeat("billing", "orders", client_id="2", over=two)
    assert (notices(one), notices(two)) == (["billing"], ["billing"])

    serving.heartbeat("billing", "orders", client_id="2", over=two)
    assert (notices(one), notices(two)) == (["billing"], ["billing"])  # nothing new

    header = UnregisterClientRequestHeader(client_id="2", consumer_group="billing")
    answer = serving.ask(RequestCode.UNREGISTER_CLIENT, header, over=two)

    assert answer.code == ResponseCode.SUCCESS
    assert notices(one) == ["billing", "billing"]
    assert members(serving) == ["1"]


def test_a_new_topic_is_news_to_all_members(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")
    serving.connection.pushed.clear()

    serving.heartbeat("billing", "orders", "invoices")

    assert notices(serving.connection) == ["billing"]


def test_members_that_broadcast_do_not_hear_of_each_other(serving: Serving) -> None:
    """Each has all queues anyway."""
    serving.heartbeat("news", "orders", model="BROADCASTING")
    serving.heartbeat("news", "orders", client_id="2", model="BROADCASTING", over=RecordingConnection())

    assert notices(serving.connection) == []


def test_a_group_may_want_no_notices(serving: Serving) -> None:
    config = SubscriptionGroupConfig(group_name="billing", notify_consumer_ids_changed_enable=False)
    serving.server.groups.put([config])

    serving.heartbeat("billing", "orders")

    assert notices(serving.connection) == []


def test_a_producer_leaves_its_group_only(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", producers=["shop"])

    header = UnregisterClientRequestHeader(client_id="client@1", producer_group="shop")
    serving.ask(RequestCode.UNREGISTER_CLIENT, header)

    assert serving.server.clients.producers("shop") == []
    assert members(serving) == ["client@1"]


def test_a_connection_that_ends_takes_its_members_along(serving: Serving) -> None:
    gone = RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="1")
    serving.heartbeat("billing", "orders", client_id="2", over=gone, producers=["shop"])
    serving.connection.pushed.clear()

    serving.server.clients.forget(gone)  # type: ignore[arg-type]

    assert members(serving) == ["1"]
    assert notices(serving.connection) == ["billing"]
    assert serving.server.clients.producer_groups() == {}


def test_a_member_that_comes_back_over_another_connection_is_one_member(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", client_id="1", over=RecordingConnection())
    serving.clock.move_ms(1)

    serving.heartbeat("billing", "orders", client_id="1")

    assert members(serving) == ["1"]
    assert serving.server.clients.consumer("billing", "1").connection is serving.connection


def test_a_client_that_is_silent_for_two_minutes_is_gone(serving: Serving) -> None:
    silent = RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="silent", over=silent, producers=["shop"])
    serving.heartbeat("billing", "orders", client_id="alive")

    serving.advance(119_000)
    assert members(serving) == ["alive", "silent"]
    serving.heartbeat("billing", "orders", client_id="alive")
    serving.advance(12_000)

    assert members(serving) == ["alive"]
    assert silent.closed_for == "no heartbeat for 120000 ms"
    assert serving.server.clients.producers("shop") == []
    assert serving.connection.closed_for is None


def test_a_client_that_lives_for_another_group_keeps_its_connection(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")
    serving.advance(60_000)
    serving.heartbeat("audit", "orders")

    serving.advance(71_000)

    assert members(serving) == []
    assert members(serving, "audit") == ["client@1"]
    assert serving.connection.closed_for is None


# --- beside listeners of the same process --------------------------------------------------------------


def test_a_group_of_this_process_takes_no_remote_members(serving: Serving) -> None:
    """They could not share the queues out, and each message would be handled twice."""
    serving.send("orders")
    member = serving.engine.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))

    beat = serving.heartbeat("billing", "orders")
    pull = serving.pull_all("orders")
    refused = serving.pull("billing", "orders")
    member.close()

    assert beat.code == refused.code == ResponseCode.NO_PERMISSION
    assert "in the broker's own process" in beat.remark
    assert pull.code == ResponseCode.SUCCESS
    assert serving.heartbeat("billing", "orders").code == ResponseCode.SUCCESS


def test_a_group_with_remote_members_takes_none_of_this_process(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    with pytest.raises(ListenerError, match="group 'billing' is read by remote clients of this broker"):
        serving.engine.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))


def test_listeners_of_this_process_and_remote_clients_read_one_topic_in_groups_of_their_own(serving: Serving) -> None:
    member = serving.engine.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.heartbeat("there", "orders")

    serving.send("orders", b"for both")

    assert [message.body for message in member.poll(10)] == [b"for both"]
    assert serving.pull("there", "orders").code == ResponseCode.SUCCESS


def test_a_remote_body_that_cannot_be_unpacked_does_not_hold_up_listeners_of_this_process(serving: Serving) -> None:
    """A client may compress with LZ4, or say that it has compressed what it has not."""
    member = serving.engine.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.send("orders", b"as lz4", sys_flag=0x101)
    serving.send("orders", b"plain")

    messages = member.poll(10)

    assert [(message.body, message.sys_flag) for message in messages] == [(b"as lz4", 0x101), (b"plain", 0)]
