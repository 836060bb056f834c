"""Retention keeps unread messages of groups whose members are clients of our server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.group import (
    DeleteSubscriptionGroupRequestHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.testing import Harness
from tests.server.serving import RecordingConnection, Serving

pytestmark = pytest.mark.usefixtures("utc")  # delete hours are local time

SMALL = EmbeddedSettings(mapped_file_size_commit_log=65_536, mapped_file_size_consume_queue=10_000)
BODY = bytes(20_000)  # three messages fill a file
ORDERS = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(engine_settings=SMALL) as serving:
        yield serving


def commit(serving: Serving, queue_offset: int, group: str = "billing") -> None:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic="orders", queue_id=0, commit_offset=queue_offset
    )
    response = serving.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS


def committed(serving: Serving) -> int:
    header = QueryConsumerOffsetRequestHeader(consumer_group="billing", topic="orders", queue_id=0)
    response = serving.request(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert response is not None
    return int(response.ext_fields["offset"])


def advance_days(serving: Serving, days: int, topic: str = "orders") -> None:
    """Let days pass, with three messages on each. Clients stay connected without heartbeats."""
    for _ in range(days):
        for _ in range(3):
            serving.send(topic, BODY)
        Harness(serving.engine).advance("1d")


def test_a_remote_group_that_is_away_for_ten_days_gets_everything(tmp_path: Path) -> None:
    """Also after a restart of the server."""
    clock = VirtualClock()
    with Serving(engine=EmbeddedBroker(tmp_path, SMALL, clock)) as serving:
        serving.send("orders", BODY)
        client = RecordingConnection()
        serving.heartbeat("billing", "orders", over=client)
        commit(serving, 1)
        serving.disconnect(client)
        advance_days(serving, 5)
    with Serving(engine=EmbeddedBroker(tmp_path, SMALL, clock)) as serving:
        advance_days(serving, 5)
        read = [
            message.queue_offset for message in serving.engine.reader.pull(ORDERS, committed(serving), 100).messages
        ]
        commit(serving, 31)
        Harness(serving.engine).advance("2d")

        assert read == list(range(1, 31))
        assert serving.engine.reader.min_offset(ORDERS) > 20


def test_a_connected_group_without_a_commit_counts_from_its_first_position(serving: Serving) -> None:
    serving.send("orders", BODY)
    serving.heartbeat("billing", "orders")

    advance_days(serving, 10)

    assert serving.engine.reader.min_offset(ORDERS) == 0
    assert [(hold.group, hold.topic) for hold in serving.engine.retention_holds()] == [("billing", "orders")]


def test_a_connected_broadcasting_group_keeps_no_file(serving: Serving) -> None:
    serving.send("orders", BODY)
    serving.heartbeat("billing", "orders", model="BROADCASTING")

    advance_days(serving, 10)

    assert serving.engine.reader.min_offset(ORDERS) > 10


def test_a_group_that_an_administrator_deletes_with_its_offsets_keeps_no_file(serving: Serving) -> None:
    serving.send("orders", BODY)
    client = RecordingConnection()
    serving.heartbeat("billing", "orders", over=client)
    commit(serving, 0)
    serving.disconnect(client)
    advance_days(serving, 10)
    before = serving.engine.reader.min_offset(ORDERS)

    header = DeleteSubscriptionGroupRequestHeader(group_name="billing", clean_offset=True)
    serving.request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
    advance_days(serving, 2)

    assert before == 0
    assert serving.engine.reader.min_offset(ORDERS) > 10
