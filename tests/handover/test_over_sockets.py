"""A hand-over between servers and clients over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, ReserveFilter
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker
from mqtemplate.errors import BrokerError, UnknownNameError, UnsupportedError
from mqtemplate.handover.admin import copy_topics
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.mover import Mover
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from tests.brokers.remote.clients import client, remote, server
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.waiting import eventually

HOUR_MS = 3_600_000
FAST = MoverSettings(settle_ms=500)


@pytest.fixture
def new(tmp_path: Path) -> Iterator[RemoteBroker]:
    with server() as cluster, client(cluster.address, tmp_path / "new") as broker:
        yield broker


@pytest.fixture(params=["embedded", "server", "namespace"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    if request.param == "embedded":
        with EmbeddedBroker(tmp_path / "store") as broker:
            yield broker
        return
    settings = {"namespace": "shop"} if request.param == "namespace" else {}
    with server() as cluster, client(cluster.address, tmp_path / "old", **settings) as remote:
        yield remote


def fill(broker: Broker) -> dict[str, int]:
    """Send timers and levels, and return ids and due times."""
    for number in range(20):
        delay = {"DELAY": "18"} if number % 2 else {"TIMER_DELAY_MS": str(HOUR_MS + number)}
        broker.sends.send(Message("orders", b"%d" % number, {"KEYS": f"k{number}", **delay}))
    return due_times(broker)


def due_times(broker: Broker) -> dict[str, int]:
    messages = broker.delayed.pending(PendingQuery(topic="orders")).messages
    return {each.msg_id: each.deliver_ms for each in messages}


def test_pending_messages_move_to_a_server_with_ids_and_due_times(old: Broker, new: RemoteBroker) -> None:
    due = fill(old)
    old.hand_over.begin("new")
    mover = Mover(old, new, FAST)
    mover.start()
    try:
        eventually(lambda: due_times(new) == due, "all messages are in the new broker")
        eventually(lambda: old.hand_over.counts().moved == 20, "all transits have ended")
    finally:
        mover.close()

    assert due_times(old) == {}
    for msg_id in due:
        assert old.delayed.cancel(key=msg_id, topic="orders").status is ScheduleChangeStatus.MOVED
        ended = old.hand_over.moved(msg_id, "orders")
        assert ended is not None
        assert new.delayed.cancel(ended.handle).status is ScheduleChangeStatus.CANCELLED
    assert due_times(new) == {}


@pytest.mark.parametrize("change", ["replace", "cancel"])
def test_a_message_that_moved_to_a_server_is_found_there_under_its_pending_key(
    old: Broker, new: RemoteBroker, change: str
) -> None:
    keyed = {Property.PENDING_KEY: "cart", Property.KEYS: "4466", Property.TIMER_DELAY_MS: str(HOUR_MS)}
    moved = old.sends.send(Message("orders", b"moved", keyed))
    old.hand_over.begin("new")
    mover = Mover(old, new, FAST)
    mover.start()
    try:
        eventually(lambda: moved.msg_id in due_times(new), "the message is in the new broker")
        eventually(lambda: old.hand_over.counts().moved == 1, "its transit has ended")
    finally:
        mover.close()

    with pytest.raises(UnsupportedError, match="pending_key='cart' of a message for .*hands its pending messages over"):
        old.sends.send(Message("orders", b"second in the old broker", keyed))
    if change == "cancel":
        assert new.delayed.cancel(key="4466", topic="orders").status is ScheduleChangeStatus.CANCELLED
    later = new.sends.send(Message("orders", b"later", keyed))

    assert len(later.replaced) == (change == "replace")
    assert list(due_times(new)) == [later.msg_id]
    assert due_times(old) == {}


def test_a_cluster_without_a_broker_at_the_start_is_asked_again_for_its_longest_delay() -> None:
    """Else the mover would take it for one without timers, and move nothing."""
    config = b"messageDelayLevel=1s 5s\ntimerPrecisionMs=1000\ntimerRollWindowSlot=172800\ntimerMaxDelaySec=259200"
    with ScriptedBroker() as cluster:
        cluster.script(RequestCode.GET_BROKER_CONFIG, lambda request: request.response(body=config))
        cluster.script(
            RequestCode.GET_BROKER_CLUSTER_INFO, lambda request: request.response(body=ClusterInfo().encode())
        )
        with remote(cluster) as broker:
            with pytest.raises(BrokerError, match="no broker is registered at the name servers"):
                broker.delay_limits()

            cluster.script(RequestCode.GET_BROKER_CLUSTER_INFO, cluster._cluster)

            assert broker.delay_limits().max_delay_ms == 259_200_000


def test_a_mover_that_was_killed_after_a_send_is_followed_by_one_that_finds_the_messages(
    old: Broker, new: RemoteBroker
) -> None:
    due = fill(old)
    source = old.hand_over
    source.begin("new")
    eventually(lambda: source.lock("killed", 1_000) and source.reserve("killed", 9, all_from_now()) == 9, "reserved")
    source.note_brokers("killed", [new.name])
    for each in source.transit()[:5]:
        properties = each.message.properties | {"TIMER_DELIVER_MS": str(each.deliver_ms)}
        new.sends.send(Message(each.topic, each.message.body, properties))

    mover = Mover(old, new, FAST, owner="next")
    mover.start()
    try:
        eventually(lambda: source.counts().moved == 20, "all transits have ended")
    finally:
        mover.close()

    assert due_times(new) == due
    assert new.delayed.count_pending(PendingQuery()).total == 20


def all_from_now() -> ReserveFilter:
    return ReserveFilter(after_ms=0, before_ms=1 << 60)


def test_state_phases_and_errors_pass_through_a_server(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        source = broker.hand_over
        assert source.state() is None
        with pytest.raises(HandOverError, match="this broker has no hand-over; start one"):
            source.change(HandOverPhase.PAUSED)
        state = source.begin("new", ["orders"], ["billing"])
        assert source.state() == state
        assert (state.topics, state.groups) == (("orders",), ("billing",))
        assert source.change(HandOverPhase.PAUSED).phase is HandOverPhase.PAUSED
        assert source.lock("me", 1_000)
        assert not source.lock("other", 1_000)
        with pytest.raises(HandOverError, match="PAUSED; only one that is RUNNING"):
            source.reserve("me", 1, all_from_now())
        source.note_error("me", "no route")
        stored = source.state()
        assert stored is not None
        assert stored.last_error == "no route"
        source.unlock("me")
        assert source.lock("other", 1_000)
        assert source.remaining() == []
        assert source.moved("unknown") is None
        assert not source.is_reserved("unknown")
        source.change(HandOverPhase.CONFIRMED)


def test_the_rights_and_queues_of_topics_are_copied_to_a_server(old: Broker, new: RemoteBroker) -> None:
    old.create_topic("archive", 3)
    old.admin().set_topic_rights("archive", is_readable=True, is_writable=False)

    changed = copy_topics({"archive": old.admin().topic_settings()["archive"]}, new)

    found = new.admin().topic_settings()["archive"]
    assert changed == ["archive"]
    assert (found.queue_count, found.is_readable, found.is_writable) == (3, True, False)
    with pytest.raises(UnknownNameError, match="archives"):
        old.admin().set_topic_rights("archives", is_readable=True, is_writable=True)
