"""Assignments of queues by the broker, and the way in which the members of a group get messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from mqtemplate.remoting.protocol.bodies.route import RegisterBrokerBody, TopicConfig, TopicConfigSerializeWrapper
from mqtemplate.remoting.protocol.headers.admin import TopicNameRequestHeader
from mqtemplate.remoting.protocol.headers.group import DeleteSubscriptionGroupRequestHeader
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def billing(serving: Serving) -> Serving:
    """A server with a topic of four queues, and three members of a group: ``a``, ``b`` and ``c``."""
    serving.engine.create_topic(TOPIC, 4)
    for name in "abc":
        serving.heartbeat(GROUP, TOPIC, client_id=name, over=RecordingConnection())
    return serving


def set_mode(
    serving: Serving, mode: str = "POP", share: int = 0, *, topic: str = TOPIC, group: str = GROUP
) -> RemotingCommand:
    body = SetMessageRequestModeRequestBody(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)
    response = serving.request(RequestCode.SET_MESSAGE_REQUEST_MODE, body=body.encode())
    assert response is not None
    return response


def query(serving: Serving, client_id: str, **fields: Any) -> RemotingCommand:
    body = QueryAssignmentRequestBody(**{"topic": TOPIC, "consumer_group": GROUP, "client_id": client_id, **fields})
    response = serving.request(RequestCode.QUERY_ASSIGNMENT, body=body.encode())
    assert response is not None
    return response


def assigned(serving: Serving, client_id: str, **fields: Any) -> list[tuple[str, int, str]] | None:
    """Return broker, queue ID and mode of each assigned queue."""
    response = query(serving, client_id, **fields)
    assert response.code == ResponseCode.SUCCESS, response
    found = QueryAssignmentResponseBody.decode(response.body).message_queue_assignments
    if found is None:
        return None
    return [(each.message_queue.broker_name, each.message_queue.queue_id, each.mode) for each in found]


def queues(mode: str, *queue_ids: int) -> Sequence[tuple[str, int, str]]:
    return [("broker-a", queue_id, mode) for queue_id in queue_ids]


# --- members that pull ------------------------------------------------------------------------------


def test_without_a_mode_each_member_pulls_from_its_part_of_the_queues(billing: Serving) -> None:
    assert assigned(billing, "a") == queues("PULL", 0, 1)
    assert assigned(billing, "b") == queues("PULL", 2)
    assert assigned(billing, "c") == queues("PULL", 3)


def test_the_queues_are_shared_by_circle_if_the_member_wants_that(billing: Serving) -> None:
    assert assigned(billing, "a", strategy_name="AVG_BY_CIRCLE") == queues("PULL", 0, 3)
    assert assigned(billing, "b", strategy_name="AVG_BY_CIRCLE") == queues("PULL", 1)


def test_a_strategy_that_the_broker_does_not_know_is_refused(billing: Serving) -> None:
    response = query(billing, "a", strategy_name="CONSISTENT_HASH")

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark == (
        "the broker assigns queues by AVG or AVG_BY_CIRCLE, got 'CONSISTENT_HASH'; set clientRebalance to true for "
        "other strategies"
    )


def test_a_broadcasting_member_gets_all_queues(billing: Serving) -> None:
    assert assigned(billing, "a", message_model="BROADCASTING") == queues("PULL", 0, 1, 2, 3)


def test_a_client_that_is_no_member_gets_no_queue(billing: Serving) -> None:
    assert assigned(billing, "stranger") == []


@pytest.mark.parametrize("fields", [{"topic": "nowhere"}, {"consumer_group": "nobody"}])
def test_without_a_topic_or_a_member_the_client_keeps_its_queues(billing: Serving, fields: dict[str, str]) -> None:
    """The field of the response is missing then. An empty list would take the queues away."""
    assert assigned(billing, "a", **fields) is None


def test_queues_that_cannot_be_read_are_not_assigned(billing: Serving) -> None:
    billing.engine.engine.topics.update(TOPIC, {"perm": 2})

    assert assigned(billing, "a") == []


# --- members that pop -------------------------------------------------------------------------------


def test_members_that_pop_get_all_queues_of_the_broker(billing: Serving) -> None:
    set_mode(billing, "POP")

    for member in "abc":
        assert assigned(billing, member) == queues("POP", -1)


def test_a_member_pops_from_its_queues_and_those_of_the_members_after_it(billing: Serving) -> None:
    set_mode(billing, "POP", 1)
    billing.heartbeat(GROUP, TOPIC, client_id="d", over=RecordingConnection())

    assert assigned(billing, "a") == queues("POP", 0, 1)
    assert assigned(billing, "d") == queues("POP", 3, 0)


def test_members_that_share_with_all_others_pop_from_all_queues(billing: Serving) -> None:
    set_mode(billing, "POP", 2)

    assert assigned(billing, "a") == queues("POP", -1)


def test_with_more_members_than_queues_each_member_has_one(billing: Serving) -> None:
    set_mode(billing, "POP", 1)
    for name in "def":
        billing.heartbeat(GROUP, TOPIC, client_id=name, over=RecordingConnection())

    assert [assigned(billing, name) for name in "ade"] == [queues("POP", 0), queues("POP", 3), queues("POP", 0)]


def test_a_retry_topic_is_always_pulled(billing: Serving) -> None:
    set_mode(billing, "POP")

    response = set_mode(billing, "POP", topic=f"%RETRY%{GROUP}")

    assert assigned(billing, "a", topic=f"%RETRY%{GROUP}") == queues("PULL", 0)
    assert (response.code, response.remark) == (
        ResponseCode.NO_PERMISSION,
        "members always pull from a retry topic; set the mode of the real topic",
    )


def test_the_queues_of_all_brokers_are_assigned() -> None:
    """A client asks one broker only."""
    with Serving(BrokerServerSettings(broker_registration_enable=True)) as serving:
        serving.engine.create_topic(TOPIC, 1)
        serving.heartbeat(GROUP, TOPIC, client_id="a")
        register_broker(serving, "broker-b", TopicConfig(topic_name=TOPIC, read_queue_nums=2, write_queue_nums=2))

        pulled = assigned(serving, "a")
        set_mode(serving, "POP")

        assert pulled == [("broker-a", 0, "PULL"), ("broker-b", 0, "PULL"), ("broker-b", 1, "PULL")]
        assert assigned(serving, "a") == [("broker-a", -1, "POP"), ("broker-b", -1, "POP")]


def register_broker(serving: Serving, name: str, config: TopicConfig) -> None:
    wrapper = TopicConfigSerializeWrapper(topic_config_table={config.topic_name: config})
    request = RemotingCommand.request(
        RequestCode.REGISTER_BROKER, body=RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()
    )
    fields = {"brokerName": name, "brokerAddr": "127.0.0.1:10921", "clusterName": "DefaultCluster", "brokerId": "0"}
    request.ext_fields = fields | {"haServerAddr": ""}
    response = serving.process(serving.connection, request)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS, response


# --- modes ------------------------------------------------------------------------------------------


def test_a_mode_survives_a_restart_in_the_format_of_rocketmq(tmp_path: Path) -> None:
    with serving_of(tmp_path) as serving:
        set_up(serving)
        set_mode(serving, "POP", 3)

    text = (tmp_path / "config/messageRequestMode.json").read_text(encoding="utf-8")
    mode = {"consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 3, "topic": TOPIC}
    assert json.loads(text) == {"messageRequestModeMap": {TOPIC: {GROUP: mode}}}
    with serving_of(tmp_path) as serving:
        serving.heartbeat(GROUP, TOPIC, client_id="a")

        assert assigned(serving, "a") == queues("POP", -1)


def test_a_table_with_unexpected_content_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    text = '{"messageRequestModeMap":{"orders":{"billing":7}}}'
    (tmp_path / "config/messageRequestMode.json").write_text(text, encoding="utf-8")
    serving = serving_of(tmp_path)

    with pytest.raises(StoreFormatError, match=r"config/messageRequestMode\.json has unexpected content"):
        serving.server.load()
    serving.engine.close()


def serving_of(folder: Path) -> Serving:
    return Serving(engine=EmbeddedBroker(folder, EmbeddedSettings(), VirtualClock()))


def set_up(serving: Serving) -> None:
    serving.engine.create_topic(TOPIC, 4)
    serving.heartbeat(GROUP, TOPIC, client_id="a")


def test_a_mode_creates_its_group(billing: Serving) -> None:
    """As in RocketMQ: an administrator sets it before the first member starts."""
    response = set_mode(billing, "POP", group="new")

    assert response.code == ResponseCode.SUCCESS
    assert billing.server.groups.find("new") is not None


def test_connected_members_are_notified_of_a_new_mode(billing: Serving) -> None:
    """They would query their assignments up to 20 seconds later."""
    member = RecordingConnection()
    billing.heartbeat(GROUP, TOPIC, client_id="d", over=member)
    member.pushed.clear()

    set_mode(billing, "POP")

    assert [command.code for command in member.pushed] == [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED]


@pytest.mark.parametrize(
    ("given", "code", "remark"),
    [
        ({"mode": "PUSH"}, ResponseCode.INVALID_PARAMETER, "mode must be PULL or POP, got 'PUSH'"),
        (
            {"topic": "nowhere"},
            ResponseCode.TOPIC_NOT_EXIST,
            "topic 'nowhere' does not exist; create it with mqadmin updateTopic",
        ),
        (
            {"group": "a b"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            "'a b' is not a valid group name; use at most 248 letters, digits, '_', '-', '%', '|'",
        ),
    ],
)
def test_a_mode_that_cannot_be_set_is_refused(
    billing: Serving, given: dict[str, str], code: ResponseCode, remark: str
) -> None:
    response = set_mode(billing, **given)  # type: ignore[arg-type]

    assert (response.code, response.remark) == (code, remark)


def test_a_deleted_topic_or_group_has_no_mode(billing: Serving) -> None:
    """A new one with the same name pulls."""
    billing.engine.create_topic("invoices", 1)
    set_mode(billing, "POP")
    set_mode(billing, "POP", topic="invoices")
    modes = billing.server.core.modes

    billing.request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=TOPIC))
    of_topics = [modes.find(topic, GROUP).mode for topic in (TOPIC, "invoices")]
    header = DeleteSubscriptionGroupRequestHeader(group_name=GROUP, clean_offset=True)
    billing.request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    assert of_topics == ["PULL", "POP"]
    assert modes.find("invoices", GROUP).mode == "PULL"
