"""A hand-over from a folder to RocketMQ, with kills of the mover and of RocketMQ meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peer.rocketmq import TIMER_FLUSH_MS, NameServer, RocketMQ, free_port
from mqtemplate.broker.hand_over import HandOverPhase, ReserveFilter
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.mover import Mover
from mqtemplate.message import Message, MessageExt
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.topics import TIMER_TOPIC
from tests.conformance.servers import is_registered
from tests.contract.test_remote_rocketmq import REQUEST_TIMEOUT_MS
from tests.waiting import eventually

HOUR_MS = 3_600_000
SECOND_MS = 1_000
SETTINGS = MoverSettings(settle_ms=2_000)


@pytest.fixture
def target(rocketmq: None, name_server: NameServer, tmp_path: Path) -> Iterator[tuple[RocketMQ, RemoteBroker]]:
    """A broker of RocketMQ that recalls timers, and a client of it."""
    options = {"timerFlushIntervalMs": TIMER_FLUSH_MS, "haListenPort": free_port()}
    settings = RemoteSettings(
        name_servers=(name_server.address,), offset_path=tmp_path / "offsets", request_timeout_ms=REQUEST_TIMEOUT_MS
    )
    with RocketMQ(tmp_path / "rocketmq", name_server, options) as server:
        eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)
        with RemoteBroker(settings) as client:
            client.create_topic("orders")
            yield server, client


def fill(old: EmbeddedBroker) -> dict[str, int]:
    """Send timers and levels that are due in an hour or more, some that are due soon, and one in four days."""
    for number in range(30):
        delay = {"DELAY": "18"} if number % 3 == 0 else {"TIMER_DELAY_MS": str(HOUR_MS + number * 137)}
        old.sends.send(Message("orders", b"late", {"KEYS": f"k{number}", **delay}))
    for number in range(5):
        old.sends.send(Message("orders", b"soon", {"TIMER_DELAY_MS": str(20 * SECOND_MS + number * 37)}))
    old.sends.send(Message("orders", b"far", {"TIMER_DELAY_MS": str(96 * HOUR_MS)}))
    messages = old.delayed.pending(PendingQuery()).messages
    return {each.msg_id: each.deliver_ms for each in messages}


def phase_of(old: EmbeddedBroker) -> HandOverPhase | None:
    state = old.hand_over.state()
    return None if state is None else state.phase


def delivered(client: RemoteBroker) -> list[MessageExt]:
    found: list[MessageExt] = []
    for queue in client.queues("orders"):
        offset = client.reader.min_offset(queue)
        while messages := client.reader.pull(queue, offset, 32).messages:
            found += messages
            offset = messages[-1].queue_offset + 1
    return found


def test_timers_and_levels_move_to_rocketmq_once_through_kills_and_come_back_by_an_abort(
    target: tuple[RocketMQ, RemoteBroker], name_server: NameServer, tmp_path: Path
) -> None:
    server, client = target
    with EmbeddedBroker(tmp_path / "old") as old:
        due = fill(old)
        source = old.hand_over
        source.begin("rocketmq")
        source.lock("embedded", 60_000)
        source.note_brokers("embedded", [client.name])
        source.reserve("embedded", 12, ReserveFilter(after_ms=0, before_ms=old.clock.now_ms() + 48 * HOUR_MS))
        for each in source.transit()[::2]:  # the mover was killed after it had sent half of them
            properties = each.message.properties | {"TIMER_DELIVER_MS": str(each.deliver_ms)}
            client.sends.send(Message(each.topic, each.message.body, properties), timeout_ms=10_000)
        server.kill()

        mover = Mover(old, client, SETTINGS)
        mover.start()
        try:
            with RocketMQ(tmp_path / "rocketmq", name_server, {"timerFlushIntervalMs": TIMER_FLUSH_MS}):
                eventually(lambda: source.counts().moved == len(due) - 1, "all but one have moved", timeout_s=90)
                [far] = old.delayed.pending(PendingQuery()).messages
                assert due[far.msg_id] == far.deliver_ms  # RocketMQ keeps timers of three days
                eventually(lambda: len(delivered(client)) >= 5, "those due soon were delivered", timeout_s=60)

                pending, soon = list[PendingMessage](), list[MessageExt]()

                def are_there_once() -> bool:
                    """RocketMQ may deliver a timer twice that was sent within the second before the kill."""
                    soon[:], pending[:] = delivered(client), client.delayed.pending(PendingQuery(), 100).messages
                    ids = [*(each.msg_id for each in pending), *{each.msg_id for each in soon}]
                    return Counter(ids) == Counter(due.keys() - {far.msg_id})

                eventually(are_there_once, "each is delivered or pending, and once")
                timers = [client.find_records((TIMER_TOPIC,), each).messages for each in due.keys() - {far.msg_id}]
                assert {len(each) for each in timers} == {1}  # none was sent twice

                source.change(HandOverPhase.ABORTING)
                eventually(lambda: phase_of(old) is HandOverPhase.ABORTED, "all are back", timeout_s=120)
                back = {each.msg_id: each.deliver_ms for each in old.delayed.pending(PendingQuery()).messages}
                assert back == {each: due[each] for each in due.keys() - {message.msg_id for message in soon}}
                eventually(lambda: client.delayed.count_pending(PendingQuery()).total == 0, "none is left in RocketMQ")
                assert source.counts().moved == len({each.msg_id for each in soon})

                source.begin("rocketmq")  # RocketMQ deletes what comes to the slot of a recall, so they get another one
                eventually(
                    lambda: client.delayed.count_pending(PendingQuery()).total == len(back) - 1,
                    "they have moved once more",
                    timeout_s=120,
                )
                again = client.delayed.pending(PendingQuery(), 100).messages
                assert all(0 <= each.deliver_ms - due[each.msg_id] <= 2 * SECOND_MS for each in again)
        finally:
            mover.close()

    assert [each.msg_id for each in soon if each.store_timestamp < due[each.msg_id]] == []
    late_ms = max(each.deliver_ms - due[each.msg_id] for each in pending)
    assert 0 <= late_ms + SECOND_MS < 2 * SECOND_MS  # slots of a second


def test_timers_move_to_the_levels_of_rocketmq_4_which_deliver_them_early_by_max_early_ms_at_most(
    rocketmq: None, tmp_path: Path
) -> None:
    with NameServer("4.9.7") as names, RocketMQ(tmp_path / "rocketmq", names, {"haListenPort": free_port()}):
        remote = RemoteSettings(
            name_servers=(names.address,), offset_path=tmp_path / "offsets", request_timeout_ms=REQUEST_TIMEOUT_MS
        )
        eventually(lambda: is_registered(remote), "the broker has registered", timeout_s=90)
        with RemoteBroker(remote) as client, EmbeddedBroker(tmp_path / "old") as old:
            client.create_topic("orders")
            old.hand_over.begin("rocketmq")
            for seconds in (34, 34, 3_000):  # a level has 30 s, and none is within 5 s of 50 minutes
                delay = {"TIMER_DELAY_MS": str(seconds * SECOND_MS)}
                old.sends.send(Message("orders", b"not empty, which RocketMQ refuses", delay))
            due = {each.msg_id: each.deliver_ms for each in old.delayed.pending(PendingQuery()).messages}
            mover = Mover(old, client, MoverSettings(max_early_ms=5 * SECOND_MS))
            mover.start()
            try:
                eventually(lambda: len(delivered(client)) == 2, "two have moved, and are delivered", timeout_s=90)
            finally:
                mover.close()

            early_ms = [due[each.msg_id] - each.store_timestamp for each in delivered(client)]
            assert max(early_ms) <= 5 * SECOND_MS
            assert old.hand_over.counts().pending == 1
