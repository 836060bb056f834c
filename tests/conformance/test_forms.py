"""Forms that RocketMQ gives a store where its options ask for them: read, or refused with what to do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import PeerError
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import StoreFormatError
from mqtemplate.message import Message, MessageQueue
from tests.conformance.story import LATER, ORDERS, read_all, send, settings
from tests.conformance.theirs import PATIENCE_MS, send_later

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]


def test_timers_of_a_wheel_kept_in_snapshots_are_delivered_once(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    """With ``timerWheelSnapshotFlush`` the file ``timerwheel`` stays zero, and what counts is in ``timerwheel.<N>``."""
    options = broker_options(settings(port)) | {"timerWheelSnapshotFlush": "true", "timerWheelSnapshotIntervalMs": 500}
    with RocketMQ(tmp_path, name_server, options) as theirs:
        java.connect()
        delivered = send_later(java, [("timer, theirs", {"delay_ms": 300})])
        assert java.read(LATER, 1, PATIENCE_MS)
        waiting = send_later(
            java, [(f"timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (6_000, 9_000, 14_000)]
        )
        theirs.stop()
    snapshots = list(tmp_path.glob("timerwheel.*"))

    with EmbeddedBroker(tmp_path, settings(port)) as ours:
        count = len(delivered + waiting)
        queues = [MessageQueue(LATER, ours.name, queue_id) for queue_id in range(4)]
        for queue in queues:
            at = ours.max_offset(queue)
            while sum(map(ours.max_offset, queues)) < count:
                ours.pull(queue, at, wait_ms=1_000)
        found = read_all(ours, LATER)

    due_ms = {sent.body: sent.due_ms for sent in delivered + waiting}
    assert snapshots
    assert Counter(message.body for message in found) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms[message.body]] == []


def test_queues_in_rocksdb_are_refused_and_made_anew_as_the_error_says(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    options = broker_options(settings(port)) | {"storeType": "defaultRocksDB"}
    with RocketMQ(tmp_path, name_server, options) as theirs:
        java.connect()
        java.send(*({"topic": ORDERS, "body": b"%d" % number} for number in range(10)))
        theirs.stop()

    with pytest.raises(StoreFormatError, match=r"RocksDB.*move consumequeue and the file checkpoint away"):
        EmbeddedBroker(tmp_path, settings(port)).start()
    for name in ("consumequeue", "checkpoint"):
        (tmp_path / name).rename(tmp_path / f"{name}-moved-away")
    with EmbeddedBroker(tmp_path, settings(port)) as ours:
        found = read_all(ours, ORDERS)

    assert sorted(message.body for message in found) == [b"%d" % number for number in range(10)]


def test_rocketmq_does_not_open_a_folder_that_is_open_here(tmp_path: Path, name_server: NameServer, port: int) -> None:
    with EmbeddedBroker(tmp_path, settings(port)) as ours:
        send(ours, Message(ORDERS, b"before"), 0)

        with (
            pytest.raises(PeerError, match="MQ already started"),
            RocketMQ(tmp_path, name_server, broker_options(settings(port))),
        ):
            pass

        send(ours, Message(ORDERS, b"after"), 0)
        assert [message.body for message in read_all(ours, ORDERS)] == [b"before", b"after"]
