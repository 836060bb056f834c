"""Clients: registration, subscriptions, and the notification of other members."""

from __future__ import annotations

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol import RequestCode, ResponseCode, Version
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


def members(serving: Serving, group: str = "billing") -> list[str]:
    header = ConsumerGroupRequestHeader(consumer_group=group)
    response = serving.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
    assert response is not None
    if response.code != ResponseCode.SUCCESS:
        return []
    return GetConsumerListByGroupResponseBody.decode(response.body).consumer_id_list


def notices(connection: RecordingConnection) -> list[str]:
    """Return the groups in the notifications that the client received."""
    assert all(push.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED for push in connection.pushed)
    assert all(push.is_one_way for push in connection.pushed)
    return [push.header(ConsumerGroupRequestHeader).consumer_group for push in connection.pushed]


# --- heartbeats --------------------------------------------------------------------------------------


def test_a_heartbeat_registers_the_member_before_the_response(serving: Serving) -> None:
    """A client that does not find its ID in the list of members assigns no queue to itself."""
    response = serving.heartbeat("billing", "orders", client_id="10.0.0.1@7#8")

    assert (response.code, response.ext_fields, response.body) == (ResponseCode.SUCCESS, {}, b"")
    assert members(serving) == ["10.0.0.1@7#8"]


def test_the_version_in_a_response_lets_clients_use_sql92(serving: Serving) -> None:
    """Java's consumers refuse to subscribe by SQL92 if the broker reports a version below 4.1.0."""
    assert serving.heartbeat("billing", "orders").version >= Version.V4_1_0_SNAPSHOT


def test_the_first_heartbeat_creates_the_group_and_its_retry_topic(serving: Serving) -> None:
    """The retry topic exists before the first message fails: a consumer subscribes to it when it starts."""
    serving.heartbeat("billing", "orders")

    assert serving.server.groups.find("billing") == SubscriptionGroupConfig(group_name="billing")
    config = serving.engine.topics.config("%RETRY%billing")
    assert config is not None
    assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (1, 1, 6)


def test_the_group_settings_determine_the_number_of_retry_queues(serving: Serving) -> None:
    serving.server.groups.put([SubscriptionGroupConfig(group_name="billing", retry_queue_nums=3)])

    serving.heartbeat("billing", "orders")

    assert serving.engine.topics.queue_count("%RETRY%billing") == 3


def test_without_auto_creation_a_missing_group_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as serving:
        response = serving.heartbeat("billing", "orders", producers=["shop"])

        assert response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert "set auto-create-subscription-group to true" in response.remark
        assert members(serving) == []
        assert [channel.client_id for channel in serving.server.clients.producers("shop")] == ["client@1"]


@pytest.mark.parametrize("group", ["with blank", "g" * 249])
def test_a_group_with_an_illegal_name_is_refused_and_other_groups_of_the_client_register(
    serving: Serving, group: str
) -> None:
    """The name would not be legal in the name of the retry topic."""
    consumers = [ConsumerData(group_name=name, subscription_data_set=[]) for name in (group, "billing")]
    heartbeat = HeartbeatData(client_id="c1", consumer_data_set=consumers)

    response = serving.request(RequestCode.HEART_BEAT, None, heartbeat.encode())

    assert response is not None
    assert response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "is no valid group name; use at most 248 letters, digits" in response.remark
    assert serving.server.groups.find(group) is None
    assert members(serving) == ["c1"]


def test_a_malformed_heartbeat_is_refused(serving: Serving) -> None:
    response = serving.request(RequestCode.HEART_BEAT, None, b"{")

    assert response is not None
    assert response.code == ResponseCode.INVALID_PARAMETER


def test_a_group_without_members_has_no_list(serving: Serving) -> None:
    response = serving.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="missing")
    )

    assert response is not None
    assert (response.code, response.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "group 'missing' has no connected consumer",
    )


def test_the_registry_has_the_properties_of_a_client(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", client_id="c1", producers=["shop"])

    channel = serving.server.clients.consumer("billing", "c1")
    assert channel is not None
    assert (channel.language, channel.version) == ("JAVA", Version.V5_5_0)
    assert channel.connection is serving.connection
    assert serving.server.clients.producer_by_client_id("c1") is not None
    assert serving.server.clients.next_producer("shop") is not None
    assert serving.server.clients.next_producer("missing") is None
    assert serving.server.clients.groups_of_topic("orders") == ["billing"]


def test_the_producers_of_a_group_rotate(serving: Serving) -> None:
    for client_id in ("a", "b"):
        serving.heartbeat("any", client_id=client_id, producers=["shop"], over=RecordingConnection())

    chosen = {serving.server.clients.next_producer("shop").client_id for _ in range(2)}

    assert chosen == {"a", "b"}


# --- subscriptions -----------------------------------------------------------------------------------


def test_a_newer_subscription_replaces_an_older_one(serving: Serving) -> None:
    """The clients choose the versions."""
    serving.heartbeat("billing", "orders", expression="a", sub_version=5)
    serving.heartbeat("billing", "orders", expression="b", sub_version=4)
    assert serving.server.clients.subscription("billing", "orders").sub_string == "a"

    serving.heartbeat("billing", "orders", expression="c", sub_version=6)

    assert serving.server.clients.subscription("billing", "orders").sub_string == "c"


def test_a_topic_that_is_missing_in_the_heartbeat_is_removed(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", "invoices")

    serving.heartbeat("billing", "orders")

    assert serving.server.clients.subscription("billing", "invoices") is None


def test_a_heartbeat_without_subscriptions_keeps_the_known_ones(serving: Serving) -> None:
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
def test_a_consumer_can_check_its_expression(serving: Serving, kind: str, expression: str, code: int) -> None:
    data = subscription("orders", expression, kind)
    body = CheckClientRequestBody(client_id="c1", group="billing", subscription_data=data).encode()

    response = serving.request(RequestCode.CHECK_CLIENT_CONFIG, None, body)

    assert response is not None
    assert response.code == code


def test_the_check_fails_if_sql92_is_disabled() -> None:
    data = subscription("orders", "price > 5", "SQL92")
    body = CheckClientRequestBody(client_id="c1", group="billing", subscription_data=data).encode()
    with Serving(BrokerServerSettings(enable_property_filter=False)) as serving:
        response = serving.request(RequestCode.CHECK_CLIENT_CONFIG, None, body)

    assert response is not None
    assert response.code == ResponseCode.SYSTEM_ERROR


# --- members that join and leave ---------------------------------------------------------------------


def test_members_are_notified_of_other_members(serving: Serving) -> None:
    one, two = RecordingConnection(), RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="1", over=one)
    one.pushed.clear()

    serving.heartbeat("billing", "orders", client_id="2", over=two)
    assert (notices(one), notices(two)) == (["billing"], ["billing"])

    serving.heartbeat("billing", "orders", client_id="2", over=two)
    assert (notices(one), notices(two)) == (["billing"], ["billing"])  # no further notification

    header = UnregisterClientRequestHeader(client_id="2", consumer_group="billing")
    response = serving.request(RequestCode.UNREGISTER_CLIENT, header, over=two)

    assert response.code == ResponseCode.SUCCESS
    assert notices(one) == ["billing", "billing"]
    assert members(serving) == ["1"]


def test_members_are_notified_of_a_new_topic(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")
    serving.connection.pushed.clear()

    serving.heartbeat("billing", "orders", "invoices")

    assert notices(serving.connection) == ["billing"]


def test_members_of_a_broadcasting_group_are_not_notified(serving: Serving) -> None:
    """Each member has all queues."""
    serving.heartbeat("news", "orders", model="BROADCASTING")
    serving.heartbeat("news", "orders", client_id="2", model="BROADCASTING", over=RecordingConnection())

    assert notices(serving.connection) == []


def test_a_group_can_disable_notifications(serving: Serving) -> None:
    config = SubscriptionGroupConfig(group_name="billing", notify_consumer_ids_changed_enable=False)
    serving.server.groups.put([config])

    serving.heartbeat("billing", "orders")

    assert notices(serving.connection) == []


def test_a_producer_that_unregisters_stays_a_consumer(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", producers=["shop"])

    header = UnregisterClientRequestHeader(client_id="client@1", producer_group="shop")
    serving.request(RequestCode.UNREGISTER_CLIENT, header)

    assert serving.server.clients.producers("shop") == []
    assert members(serving) == ["client@1"]


def test_a_closed_connection_removes_its_members(serving: Serving) -> None:
    closed = RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="1")
    serving.heartbeat("billing", "orders", client_id="2", over=closed, producers=["shop"])
    serving.connection.pushed.clear()

    serving.server.clients.forget(closed.id)

    assert members(serving) == ["1"]
    assert notices(serving.connection) == ["billing"]
    assert serving.server.clients.producer_groups() == {}


def test_a_member_that_reconnects_is_one_member(serving: Serving) -> None:
    serving.heartbeat("billing", "orders", client_id="1", over=RecordingConnection())
    serving.clock.move_ms(1)

    serving.heartbeat("billing", "orders", client_id="1")

    assert members(serving) == ["1"]
    assert serving.server.clients.consumer("billing", "1").connection is serving.connection


def test_a_client_without_heartbeats_for_two_minutes_is_removed(serving: Serving) -> None:
    silent = RecordingConnection()
    serving.heartbeat("billing", "orders", client_id="silent", over=silent, producers=["shop"])
    serving.heartbeat("billing", "orders", client_id="alive")

    serving.advance(119_000)
    assert members(serving) == ["alive", "silent"]
    serving.heartbeat("billing", "orders", client_id="alive")
    serving.advance(12_000)

    assert members(serving) == ["alive"]
    assert silent.closed_for == "no heartbeat for 2m"
    assert serving.server.clients.producers("shop") == []
    assert serving.connection.closed_for is None


def test_a_client_with_heartbeats_for_another_group_keeps_its_connection(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")
    serving.advance(60_000)
    serving.heartbeat("audit", "orders")

    serving.advance(71_000)

    assert members(serving) == []
    assert members(serving, "audit") == ["client@1"]
    assert serving.connection.closed_for is None


# --- remote clients and listeners of the broker's process ----------------------------------------------


def test_a_group_of_this_process_refuses_remote_members(serving: Serving) -> None:
    """The two kinds of members would not share the queues, and each message would be handled twice."""
    serving.send("orders")
    member = serving.engine.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))

    heartbeat = serving.heartbeat("billing", "orders")
    pull = serving.pull_all("orders")
    refused = serving.pull("billing", "orders")
    member.close()

    assert heartbeat.code == refused.code == ResponseCode.NO_PERMISSION
    assert "in the broker's own process" in heartbeat.remark
    assert pull.code == ResponseCode.SUCCESS
    assert serving.heartbeat("billing", "orders").code == ResponseCode.SUCCESS


def test_a_group_with_remote_members_refuses_members_of_this_process(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    with pytest.raises(ListenerError, match="group 'billing' is read by remote clients of this broker"):
        serving.engine.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))


def test_a_group_of_this_process_and_a_remote_group_read_the_same_topic(serving: Serving) -> None:
    member = serving.engine.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.heartbeat("there", "orders")

    serving.send("orders", b"for both")

    assert [message.body for message in member.poll(10)] == [b"for both"]
    assert serving.pull("there", "orders").code == ResponseCode.SUCCESS


def test_a_remote_body_that_cannot_be_decompressed_does_not_stop_listeners_of_this_process(serving: Serving) -> None:
    """A client may compress with LZ4, or set the flag for a body that is not compressed."""
    member = serving.engine.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.send("orders", b"as lz4", sys_flag=0x101)
    serving.send("orders", b"plain")

    messages = member.poll(10)

    assert [(message.body, message.sys_flag) for message in messages] == [(b"as lz4", 0x101), (b"plain", 0)]


# --- new topics --------------------------------------------------------------------------------------


def test_the_members_of_the_groups_that_subscribe_to_a_new_topic_are_notified(serving: Serving) -> None:
    """Otherwise they find it with their next periodic look-up. Also those of a broadcasting group."""
    billing, shipping, other = (RecordingConnection() for _ in range(3))
    serving.heartbeat("billing", "orders", over=billing, client_id="c1")
    serving.heartbeat("shipping", "orders", over=shipping, client_id="c2", model="BROADCASTING")
    serving.heartbeat("other", "invoices", over=other, client_id="c3")
    for connection in (billing, shipping, other):
        connection.pushed.clear()

    serving.send("orders")
    serving.send("orders")

    assert [notices(connection) for connection in (billing, shipping, other)] == [["billing"], ["shipping"], []]
