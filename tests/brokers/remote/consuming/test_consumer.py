"""Assignment and polls of one member on a scripted broker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.consuming.pulls import PullLoop
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from tests.brokers.remote.clients import assign_again, client, join, message_ext
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.remoting.protocol.other_side import encode_message


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic("orders", queues=1)
        ScriptedGroups(broker)
        yield broker


@pytest.fixture
def broker(cluster: ScriptedBroker, tmp_path: Path) -> Iterator[RemoteBroker]:
    with client(cluster.address, tmp_path) as broker:
        yield broker


def pulled(request: RemotingCommand, *messages: MessageExt) -> RemotingCommand:
    """Return the response to a pull with these messages; without messages, the response that reports none."""
    end = request.header(PullMessageRequestHeader).queue_offset + len(messages)
    header = PullMessageResponseHeader(suggest_which_broker_id=0, next_begin_offset=end, min_offset=0, max_offset=end)
    code = ResponseCode.SUCCESS if messages else ResponseCode.PULL_NOT_FOUND
    return request.response(code, header=header, body=b"".join(encode_message(message) for message in messages))


def test_the_first_poll_returns_what_this_client_has_sent(cluster: ScriptedBroker, broker: RemoteBroker) -> None:
    """A broker acknowledges a message before it is in its queue: the first pull may arrive before it."""
    message = message_ext()

    def pull(request: RemotingCommand) -> RemotingCommand | Future[RemotingCommand]:
        header = request.header(PullMessageRequestHeader)
        if header.queue_offset > 0:
            return Future()
        return pulled(request, message) if header.suspend_timeout_millis else pulled(request)

    cluster.script(RequestCode.PULL_MESSAGE, pull)
    broker.sends.send(Message("orders", b"x"))
    member = join(broker, "orders")

    assert [polled.body for polled in member.poll(8)] == [b"x"]


def test_an_empty_retry_queue_starts_at_0_without_a_request(cluster: ScriptedBroker, broker: RemoteBroker) -> None:
    """ACL 2.0 refuses a request for the offsets of a retry topic."""
    cluster.topic("%RETRY%billing", queues=1)

    with capture_logs() as logs:
        member = join(broker, "orders")

    offsets = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    asked = [request.ext_fields["topic"] for request in cluster.seen if request.code in offsets]
    assert asked == ["orders"]
    assert sorted((queue.topic, member.position(queue)) for queue in member.assignment()) == [
        ("%RETRY%billing", 0),
        ("orders", 0),
    ]
    assert [log for log in logs if log["event"] == "remote.queue_start_failed"] == []


def test_a_refused_start_of_a_queue_is_logged_once_for_each_reason(
    cluster: ScriptedBroker, broker: RemoteBroker
) -> None:
    """The start is tried again every few seconds."""
    starts: list[str] = []

    def rebalance(remark: str) -> None:
        cluster.refuse(RequestCode.QUERY_CONSUMER_OFFSET, ResponseCode.NO_PERMISSION, remark)
        with capture_logs() as logs:
            assert not member.rebalance()  # type: ignore[attr-defined]
        starts.extend(log["reason"] for log in logs if log["event"] == "remote.queue_start_failed")

    cluster.refuse(RequestCode.QUERY_CONSUMER_OFFSET, ResponseCode.NO_PERMISSION, "no right")
    with capture_logs() as logs:
        member = join(broker, "orders")
    starts += [log["reason"] for log in logs if log["event"] == "remote.queue_start_failed"]
    for remark in ("no right", "no right", "no account", "no account"):
        rebalance(remark)

    assert [remark for reason in starts for remark in ("no right", "no account") if remark in reason] == [
        "no right",
        "no account",
    ]


def test_a_queue_is_assigned_before_its_messages_are_pulled(
    broker: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member ignores commits of queues that are not assigned to it."""
    member = join(broker, "orders")
    [queue] = [queue for queue in member.assignment() if queue.topic == "orders"]
    was_assigned: dict[MessageQueue, bool] = {}

    def add(loop: PullLoop, added: MessageQueue, queue_offset: int) -> None:
        was_assigned[added] = added in member.assignment()

    monkeypatch.setattr(PullLoop, "add", add)
    assign_again(member, {queue})

    assert was_assigned == {queue: True}


def test_a_reset_commits_its_offset_before_the_messages_are_pulled_again(
    broker: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise who handles them could read, and flush, the offset before the reset."""
    member = join(broker, "orders")
    [queue] = [queue for queue in member.assignment() if queue.topic == "orders"]
    member.commit(queue, 3)
    own_offsets: list[int | None] = []

    def seek(loop: PullLoop, sought: MessageQueue, queue_offset: int) -> None:
        own_offsets.append(member.committed(sought))

    monkeypatch.setattr(PullLoop, "seek", seek)
    member.reset({queue: 0})  # type: ignore[attr-defined]

    assert own_offsets == [0]
